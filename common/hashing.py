"""Names of KV blocks by content, equal in every process and on every host.

The hash of a full block covers its tokens and the hash of the block before it, so that it stands for the
whole prefix up to its end. The first block follows a root made of the model's fingerprint and the request's
cache salt: blocks of another model, or of a tenant with another salt, never match. Imports no torch: the
proxy routes by these hashes.
"""

import functools
import hashlib
import struct
from collections.abc import Iterator, Sequence

HASH_BYTES = 16


@functools.lru_cache(1000)
def root_hash(model_fingerprint: str, cache_salt: str = "") -> bytes:
    """What the first block's hash follows."""
    fingerprint = model_fingerprint.encode()
    data = struct.pack("<Q", len(fingerprint)) + fingerprint + cache_salt.encode()
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``hashes`` does not hold yet. Token ids
    must fit into 32 bits without sign."""
    for _ in _further_hashes(hashes, root, token_ids, block_size):
        pass


def known_and_further(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int
) -> Iterator[bytes]:
    """The hashes of the full blocks of ``token_ids`` one by one: those that ``hashes`` holds, then those that
    are computed, and appended, as they are asked for."""
    yield from hashes[: len(token_ids) // block_size]
    yield from _further_hashes(hashes, root, token_ids, block_size)


def _further_hashes(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int
) -> Iterator[bytes]:
    pack = struct.Struct(f"<{block_size}I").pack
    parent = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        data = parent + pack(*token_ids[end - block_size : end])
        parent = hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
        yield parent


def block_hashes(
    model_fingerprint: str, cache_salt: str, token_ids: Sequence[int], block_size: int
) -> list[bytes]:
    """The hashes of all full blocks of ``token_ids``."""
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(model_fingerprint, cache_salt), token_ids, block_size)
    return hashes
