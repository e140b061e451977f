"""The 64-bit hash that guards every payload, computed in the same pass over memory that copies it."""

import sys
from functools import cache
from typing import Protocol

import xxhash

from kernels import native
from kernels.native.hashing import LEAST_BYTES, Hash
from kv_transfer.memory import Copy, copy

HASH_BYTES = 8
CACHED_BYTES = 256 << 10  # a core's own cache holds this twice, copied and copy, with room to spare


class Digest(Protocol):
    """xxh3_64 over everything that it is given, as if it were one."""

    def update(self, source: memoryview) -> None: ...

    def copy(self, source: memoryview, target: memoryview) -> None:
        """``update`` that copies; both have the same size."""
        ...

    def digest(self) -> bytes: ...


def copying(digest: Digest | None) -> Copy:
    return copy if digest is None else digest.copy


class LibraryHash:
    """For payloads, and machines, that the kernels' hash is not for."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, source: memoryview) -> None:
        self._hash.update(source)

    def copy(self, source: memoryview, target: memoryview) -> None:
        for start in range(0, source.nbytes, CACHED_BYTES):
            piece = slice(start, start + CACHED_BYTES)
            copy(source[piece], target[piece])
            self._hash.update(target[piece])

    def digest(self) -> bytes:
        return self._hash.digest()


@cache
def has_kernels() -> bool:
    """Whether hashing is fused with copying here. The first call may compile the kernels for a minute: to be
    asked before anybody waits."""
    return sys.byteorder == "little" and native.available() is None


def digest_for(num_bytes: int) -> Digest:
    """For a payload of so many bytes in all."""
    return Hash() if num_bytes >= LEAST_BYTES and has_kernels() else LibraryHash()
