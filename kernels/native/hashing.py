"""Copying and hashing in one pass over memory."""

from ctypes import Structure, byref, c_int64, c_ubyte, c_uint64

import numpy as np

from kernels.native.library import load

STRIPE = 64
LEAST_BYTES = 241  # shorter inputs have another hash


class _Hash(Structure):
    _fields_ = [
        ("sums", c_uint64 * 8),
        ("stripe", c_int64),
        ("num_bytes", c_int64),
        ("num_pending", c_int64),
        ("before", c_ubyte * STRIPE),
        ("pending", c_ubyte * STRIPE),
    ]


class Hash:
    """xxh3_64, fed piece by piece, of what will be ``LEAST_BYTES`` at least. ``BuildError`` where there is no
    library."""

    def __init__(self) -> None:
        self._library = load()
        self._state = _Hash()
        self._library.baton_hash_begin(byref(self._state))

    def update(self, source: memoryview) -> None:
        self._library.baton_hash_update(byref(self._state), _address(source), None, source.nbytes)

    def copy(self, source: memoryview, target: memoryview) -> None:
        """``update`` that copies. ``target`` must be as long as ``source`` and apart from it."""
        if source.nbytes != target.nbytes or target.readonly:
            raise ValueError(f"{source.nbytes} bytes cannot be copied to {target.nbytes}")
        address = _address(source)
        self._library.baton_hash_update(byref(self._state), address, _address(target), source.nbytes)

    def digest(self) -> bytes:
        value: int = self._library.baton_hash_value(byref(self._state))
        return value.to_bytes(8)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
