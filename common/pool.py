"""Which blocks of the cache are free, and which hold what. No tensors.

The life of a block:

    FREE     holds nothing of use
    OWNED    referenced by one or more sequences (or by a reservation)
    CACHED   referenced by nobody, its content known by its hash; taken again by that hash, or evicted when
             no block is FREE, least recently used first

An owned block whose content is complete is *committed* under its hash, so that other sequences may share it
from then on. Shared blocks are full, and full blocks are never written again.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class CacheEvents(NamedTuple):
    """Net changes of the set of known hashes."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class BlockPool:
    """``caching`` False: nothing is ever found by hash, and unreferenced blocks are free at once."""

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self._free = deque(range(num_blocks))
        self._cached: dict[int, None] = {}  # in order of eviction
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of ``hashes``. They stay evictable until taken."""
        found = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def take(self, count: int, shared: Sequence[int] = (), spare: int = 0) -> list[int] | None:
        """``count`` blocks, the first of them ``shared`` (from ``find``), the others fresh. None, and
        nothing is taken, unless ``spare`` blocks stay free afterwards."""
        num_fresh = count - len(shared)
        assert num_fresh >= 0, f"{len(shared)} shared blocks for a sequence of {count}"
        num_revived = sum(self._refs[block_id] == 0 for block_id in shared)
        if self.num_free - num_revived - num_fresh < spare:
            return None
        for block_id in shared:
            self._cached.pop(block_id, None)
            self._refs[block_id] += 1
        # In ascending order neighbours in a sequence are often neighbours in memory, and travel as one piece.
        fresh = sorted(self._pop() for _ in range(num_fresh))
        for block_id in fresh:
            self._refs[block_id] = 1
        return [*shared, *fresh]

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence. Of a prefix, later blocks are evicted before
        earlier ones: without the earlier ones they are never found."""
        for block_id in reversed(block_ids):
            assert self._refs[block_id] > 0, f"block {block_id} given back twice"
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                if self._hash_of[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def commit(self, block_id: int, block_hash: bytes) -> None:
        """The owned block's content is complete. Where another block is known under the hash already, that
        one stays."""
        assert self._refs[block_id] > 0, f"block {block_id} committed without an owner"
        if not self.caching or block_hash in self._block_of or self._hash_of[block_id] is not None:
            return
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        _note(block_hash, self._stored, self._removed)

    def hashes(self) -> tuple[bytes, ...]:
        """All hashes that ``find`` knows."""
        return tuple(self._block_of)

    def take_events(self) -> CacheEvents:
        """What changed since the last call."""
        events = CacheEvents(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that every block is free, cached or owned, and owned by ``holders`` exactly as often as
        counted."""
        owned: dict[int, int] = {}
        for block_ids in holders:
            for block_id in block_ids:
                owned[block_id] = owned.get(block_id, 0) + 1
        self._check_counts(owned)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._cached.keys(), "a block is both free and cached"
        assert not owned.keys() & (free | self._cached.keys()), "an owned block can be taken"
        assert len(owned) + self.num_free == self.num_blocks, "blocks are lost"
        for block_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == block_hash, f"block {block_id} is known under another's hash"
        assert all(self._hash_of[block_id] is None for block_id in free), "a free block has a hash"
        num_hashes = sum(block_hash is not None for block_hash in self._hash_of)
        assert num_hashes == len(self._block_of), "a hashed block cannot be found"

    def _check_counts(self, owned: Mapping[int, int]) -> None:
        for block_id, refs in enumerate(self._refs):
            num_owners = owned.get(block_id, 0)
            assert refs == num_owners, f"block {block_id}: {refs} references, {num_owners} owners"

    def _pop(self) -> int:
        if self._free:
            return self._free.popleft()
        block_id = next(iter(self._cached))
        del self._cached[block_id]
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        self._hash_of[block_id] = None
        del self._block_of[block_hash]
        _note(block_hash, self._removed, self._stored)
        return block_id


def _note(block_hash: bytes, now: dict[bytes, None], opposite: dict[bytes, None]) -> None:
    """Record a change, unless it undoes one not told yet."""
    if block_hash in opposite:
        del opposite[block_hash]
    else:
        now[block_hash] = None
