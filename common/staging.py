"""How blocks get from a device's memory into main memory, and back.

Main memory is pinned, so that the device copies by itself, and copies go to the calling thread's stream: the
thread of transfers has one of its own (``common.gpu``), beside the steps. What a step wrote can be read once
the host has seen the step end. Every copy is over when a call returns, so that blocks and buffers belong to
nobody but the caller."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from common import gpu

# Copies that are begun one by one; beginning one takes about as long as copying 100 KB. Usual blocks are
# larger, and few make a piece: copy engines move them and no step notices. More and smaller ones that lie
# anywhere are gathered by a kernel and cross the bus in one copy.
MOST_COPIES = 4
WHOLE = slice(None)


class BlockOps(Protocol):
    """``kernels.specification`` or ``kernels.triton.blocks``."""

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, dtype: torch.dtype) -> Tensor: ...

    def scatter_blocks(
        self, values: Tensor, scales: Tensor | None, block_ids: Tensor, cache: Tensor
    ) -> None: ...


class Staging:
    def __init__(self, data: Tensor, block_ops: BlockOps) -> None:
        """``data`` [N, ...]: the cache, blocks first."""
        self._rows = data.flatten(1, -2)  # [N, R, D]
        self._bytes = data.view(torch.uint8).flatten(1)  # [N, block_bytes]
        self._block_ops = block_ops

    def read(self, block_ids: Sequence[int], part: slice = WHOLE) -> memoryview:
        """A copy of the blocks' bytes, or of the same ``part`` of each, in this order."""
        host, spans = self._host_memory(len(block_ids), part), runs(block_ids)
        if self._is_partial(part):
            host.copy_(self._bytes[:, part][self._ids(block_ids)])
        elif len(spans) > MOST_COPIES:
            gathered = self._block_ops.gather_blocks(self._rows, self._ids(block_ids), self._rows.dtype)
            self._as_rows(host).copy_(gathered, non_blocking=True)
        else:
            for rows, blocks in self._pairs(host, spans):
                rows.copy_(blocks, non_blocking=True)
        gpu.wait(self._rows.device)
        return _view(host)

    def landing(self, num_blocks: int, part: slice = WHOLE) -> memoryview:
        """Where to write the bytes of so many blocks, or of a ``part`` of each; then call ``landed``."""
        return _view(self._host_memory(num_blocks, part))

    def landed(self, block_ids: Sequence[int], view: memoryview, part: slice = WHOLE) -> None:
        """What was written to ``landing``'s view is what the blocks, which must differ, hold from now on."""
        host, spans = torch.frombuffer(view, dtype=torch.uint8).view(len(block_ids), -1), runs(block_ids)
        if self._is_partial(part):
            self._bytes[:, part].index_copy_(0, self._ids(block_ids), host.to(self._bytes.device))
        elif len(spans) > MOST_COPIES:
            values = self._as_rows(host).to(self._rows.device, non_blocking=True)
            self._block_ops.scatter_blocks(values, None, self._ids(block_ids), self._rows)
        else:
            for rows, blocks in self._pairs(host, spans):
                blocks.copy_(rows, non_blocking=True)
        gpu.wait(self._rows.device)

    def _is_partial(self, part: slice) -> bool:
        """Parts come from workers that have their blocks in main memory, and cross the bus as they can."""
        return len(range(*part.indices(self._bytes.shape[1]))) < self._bytes.shape[1]

    def _host_memory(self, num_blocks: int, part: slice) -> Tensor:
        """[num_blocks, bytes of each] uint8; PyTorch keeps pinned memory for the next call."""
        pinned = self._rows.device.type == "cuda"
        width = len(range(*part.indices(self._bytes.shape[1])))
        return torch.empty(num_blocks, width, dtype=torch.uint8, pin_memory=pinned)

    def _as_rows(self, host: Tensor) -> Tensor:
        return host.view(self._rows.dtype).view(len(host), *self._rows.shape[1:])

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64).to(self._rows.device)

    def _pairs(self, host: Tensor, spans: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of ``host`` and the blocks that they stand for, bytes both, a pair for each run of blocks."""
        row = 0
        for first, last in spans:
            yield host[row : row + last - first + 1], self._bytes[first : last + 1]
            row += last - first + 1


def _view(host: Tensor) -> memoryview:
    return host.flatten().numpy().data


def runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive ids."""
    if not block_ids:
        return []
    breaks = [index for index, (a, b) in enumerate(pairwise(block_ids), 1) if b != a + 1]
    starts, ends = [0, *breaks], [*breaks, len(block_ids)]
    return [(block_ids[start], block_ids[end - 1]) for start, end in zip(starts, ends, strict=True)]
