"""The 64-bit hash that guards every payload."""

from collections.abc import Iterable

import xxhash

Checksum = xxhash.xxh3_64  # fed piece by piece


def checksum(payload: Iterable[memoryview]) -> int:
    """xxh3_64 over the buffers as if they were one."""
    digest = Checksum()
    for view in payload:
        digest.update(view)
    return digest.intdigest()
