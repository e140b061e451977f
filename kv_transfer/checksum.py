"""The 64-bit hash that guards every payload."""

from collections.abc import Iterable

import xxhash


def checksum(payload: Iterable[memoryview]) -> int:
    """xxh3_64 over the buffers as if they were one."""
    digest = xxhash.xxh3_64()
    for view in payload:
        digest.update(view)
    return digest.intdigest()
