"""Main memory in large pages: who reads through gigabytes spends much of the time looking up small ones, on a
virtual machine most of it."""

import mmap
from contextlib import suppress
from functools import cache
from threading import Lock

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
REGION_BYTES = 16 * LARGE_PAGE
ALIGNMENT = 64  # a cache line


def in_large_pages(num_bytes: int) -> memoryview:
    """``num_bytes`` zeros in memory of their own. Every page is there from the start: getting one when it is
    first written takes longer than the writing."""
    unit = LARGE_PAGE if num_bytes >= LARGE_PAGE else mmap.PAGESIZE
    length = round_up(num_bytes, unit)  # only whole large pages are placed where they can be such
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:: mmap.PAGESIZE] = bytes(length // mmap.PAGESIZE)
    return memoryview(memory)[:num_bytes]


class Regions:
    """Hands out pieces of large regions; a region goes when all its pieces are gone."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 that begins at a cache line."""
        if num_bytes > REGION_BYTES // 4:
            return torch.frombuffer(in_large_pages(num_bytes), dtype=torch.uint8)
        with self._lock:
            if num_bytes > len(self._rest):
                self._rest = torch.frombuffer(in_large_pages(REGION_BYTES), dtype=torch.uint8)
            piece, self._rest = self._rest[:num_bytes], self._rest[round_up(num_bytes, ALIGNMENT) :]
        return piece


@cache
def regions() -> Regions:
    """This process's."""
    return Regions()


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
