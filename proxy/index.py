"""Which blocks the workers hold, exactly as they tell it.

A block's name (see ``common.hashing``) stands for everything from the prompt's beginning to the block's end.
For each name there is one integer with a bit for every worker that holds the block, so that one look finds
all of them, and what a prompt has in common with every worker takes as many looks as the longest match has
blocks, however many workers there are.

The bit of a worker that has gone is not looked at from then on. It is taken out of a million integers bit by
bit, so that nobody has to wait for that, and only then is it another worker's.
"""

from collections.abc import Iterable
from itertools import groupby

Overlap = dict[str, int]  # incarnation -> leading blocks that it holds; who holds none is left out


class BlockIndex:
    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}  # incarnation -> its bit
        self._names: dict[int, str] = {}
        self._living = 0  # all of these bits
        self._next_bit = 1  # which nobody has had
        self._free_bits: list[int] = []
        self._dead = 0
        self._leaving = 0  # bits that are being taken out
        self._unswept: list[bytes] = []  # blocks that may still have them
        self._num_blocks: dict[str, int] = {}

    def __len__(self) -> int:
        """Different blocks known."""
        return len(self._holders)

    def num_blocks(self, incarnation: str) -> int:
        """Blocks that the worker holds."""
        return self._num_blocks.get(incarnation, 0)

    def store(self, incarnation: str, hashes: Iterable[bytes]) -> None:
        bit = self._bit_of(incarnation)
        holders = self._holders
        count = 0
        for block_hash in hashes:
            known = holders.get(block_hash)
            if known is None:
                holders[block_hash] = bit  # the same object for all of a worker's blocks
                count += 1
            elif not known & bit:
                holders[block_hash] = known | bit
                count += 1
        self._num_blocks[incarnation] += count

    def remove(self, incarnation: str, hashes: Iterable[bytes]) -> None:
        """Blocks that it does not hold are passed over."""
        bit = self._bits.get(incarnation, 0)
        for block_hash in hashes:
            known = self._holders.get(block_hash, 0)
            if known & bit:
                self._take(block_hash, known, bit)
                self._num_blocks[incarnation] -= 1

    def forget(self, incarnation: str) -> None:
        """The worker is gone, or begins anew."""
        bit = self._bits.pop(incarnation, 0)
        if bit:
            del self._names[bit], self._num_blocks[incarnation]
            self._living &= ~bit
            self._dead |= bit

    def sweep(self, max_blocks: int = 20_000) -> None:
        """Go on with clearing up after workers that are gone; to be called now and then."""
        if not self._leaving and self._dead:
            self._leaving, self._dead = self._dead, 0
            self._unswept = list(self._holders)
        for block_hash in self._unswept[-max_blocks:]:
            known = self._holders.get(block_hash, 0)
            if known & self._leaving:
                self._take(block_hash, known, self._leaving)
        del self._unswept[-max_blocks:]
        if not self._unswept:
            self._free_bits += _bits_of(self._leaving)
            self._leaving = 0

    def overlap(self, hashes: Iterable[bytes]) -> Overlap:
        """How many leading blocks of a prompt each worker holds. ``hashes`` is read no further than somebody
        knows it."""
        found: Overlap = {}
        sharing = self._living
        count = 0
        for holders, blocks in groupby(map(self._holders.get, hashes)):
            still = sharing & (holders or 0)
            if count:
                self._note(sharing & ~still, count, found)
            if not still:
                return found
            sharing = still
            count += len(list(blocks))
        if count:
            self._note(sharing, count, found)
        return found

    def _note(self, bits: int, count: int, found: Overlap) -> None:
        for bit in _bits_of(bits):
            found[self._names[bit]] = count

    def _take(self, block_hash: bytes, known: int, bit: int) -> None:
        if left := known & ~bit:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]

    def _bit_of(self, incarnation: str) -> int:
        bit = self._bits.get(incarnation)
        if bit is None:
            bit = self._free_bits.pop() if self._free_bits else self._next_bit
            if bit == self._next_bit:
                self._next_bit <<= 1
            self._bits[incarnation] = bit
            self._living |= bit
            self._names[bit] = incarnation
            self._num_blocks[incarnation] = 0
        return bit


def _bits_of(number: int) -> list[int]:
    bits = []
    while number:
        bits.append(number & -number)
        number &= number - 1
    return bits
