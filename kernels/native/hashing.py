"""Copying and hashing in one pass over memory."""

import ctypes
from ctypes import Structure, byref, c_char, c_int64, c_ubyte, c_uint64
from functools import cache

import numpy as np

from kernels.native.library import SIGNATURES, load

STRIPE = 64
LEAST_BYTES = 241  # shorter inputs have another hash
SMALL_BYTES = 16 << 10  # take less time than getting the interpreter's lock back may


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
        self._state = _Hash()
        self._pointer = byref(self._state)
        _brief().baton_hash_begin(self._pointer)

    def update(self, source: memoryview) -> None:
        self._feed(source, None)

    def copy(self, source: memoryview, target: memoryview) -> None:
        """``update`` that copies. ``target`` must be as long as ``source`` and apart from it."""
        if source.nbytes != target.nbytes or target.readonly:
            raise ValueError(f"{source.nbytes} bytes cannot be copied to {target.nbytes}")
        self._feed(source, _address(target))

    def digest(self) -> bytes:
        value: int = _brief().baton_hash_value(self._pointer)
        return value.to_bytes(8)

    def _feed(self, source: memoryview, target: int | None) -> None:
        library = _brief() if source.nbytes < SMALL_BYTES else load()
        library.baton_hash_update(self._pointer, _address(source), target, source.nbytes)


@cache
def _brief() -> ctypes.PyDLL:
    """The same functions, for calls that keep the interpreter's lock."""
    library = ctypes.PyDLL(load()._name)
    for name in ("baton_hash_begin", "baton_hash_update", "baton_hash_value"):
        function = getattr(library, name)
        function.restype, function.argtypes = SIGNATURES[name]
    return library


def _address(view: memoryview) -> int | None:
    if not view.nbytes:
        return None
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(c_char.from_buffer(view))
