"""Blocks that lie in the memory of a device, for transports that reach into it."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from xxhash import xxh3_64_digest

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """Each of ``tensors`` is a whole block, [block_bytes] uint8: however blocks lie at either end, a piece
    that is a block fits."""

    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, views: Iterable[memoryview], block_bytes: int) -> "DeviceBlocks":
        """The same in main memory. Each view must hold whole blocks."""
        whole = (torch.frombuffer(view, dtype=torch.uint8) for view in views)
        return cls([block for tensor in whole for block in tensor.view(-1, block_bytes)])

    def checksum(self) -> bytes:
        """64 bits, computed where the blocks are: of each a sum over its words, xxh3_64 over these sums. No
        change of a single word goes unnoticed, and hardly one of several. Waits for the device, in the
        calling thread's stream."""
        sums = torch.stack([_sum_of(block.view(torch.int64)) for block in self.tensors]).tolist()
        return xxh3_64_digest(struct.pack(f"<{len(sums)}q", *sums))


def _sum_of(words: Tensor) -> Tensor:
    """Modulo 2^64, with weights 1, 3, 5, ... by place. The upper half of a word is brought into its lower
    half first: changes of high bits alone would be the same with any weight."""
    mixed = words ^ ((words >> 32) & 0xFFFFFFFF)
    return (mixed * torch.arange(1, 2 * len(words), 2, device=words.device)).sum()
