"""From a plan to the tensors that the model computes with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.scheduler import Work
from kernels import AttentionBatch, Watch


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor  # [T] int64
    attention: AttentionBatch
    sample_rows: Tensor | None  # [S'] int64: output rows of the works that sample, in their order; None: all


def build(works: Sequence[Work], block_size: int, device: torch.device, watch: Watch | None = None) -> Batch:
    """Rows in the order of ``works``, which must not be empty."""
    counts = np.array([work.num_tokens for work in works])
    starts = np.array([work.start for work in works])
    query_starts = np.zeros(len(works) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    context_lens = (starts + counts).astype(np.int32)
    block_tables = _block_tables(works, block_size)
    owners = np.repeat(np.arange(len(works)), counts)  # [T] index of the work that a row belongs to
    positions = np.arange(query_starts[-1]) - query_starts[owners] + starts[owners]
    blocks = block_tables[owners, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    num_outputs = np.array([work.num_outputs for work in works])

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    attention = AttentionBatch(
        query_starts=tensor(query_starts),
        context_lens=tensor(context_lens),
        block_tables=tensor(block_tables),
        slots=tensor(slots),
        positions=tensor(positions),
        max_query_len=int(counts.max()),
        max_context_len=int(context_lens.max()),
        output_rows=None
        if (num_outputs == counts).all()
        else tensor(_output_rows(query_starts, num_outputs)),
        watch=watch,
    )
    samples = np.array([work.samples for work in works])
    sample_rows = None if (num_outputs == samples).all() else tensor(num_outputs.cumsum()[samples] - 1)
    return Batch(tensor(_token_ids(works)), attention, sample_rows)


def _output_rows(query_starts: NDArray[np.int32], num_outputs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last ``num_outputs`` [S] of each sequence's rows."""
    before = num_outputs.cumsum() - num_outputs
    return np.arange(num_outputs.sum()) + np.repeat(query_starts[1:] - num_outputs - before, num_outputs)


def _token_ids(works: Sequence[Work]) -> NDArray[np.int64]:
    token_ids: list[int] = []
    for sequence, start, count, _ in works:
        if count == 1:
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids += sequence.token_ids[start : start + count]
    return np.array(token_ids, np.int64)


def _block_tables(works: Sequence[Work], block_size: int) -> NDArray[np.int32]:
    """Only the blocks that hold context in this step: [S, max blocks], 0 where there is none."""
    widths = [-(-(work.start + work.num_tokens) // block_size) for work in works]
    tables = np.zeros((len(works), max(widths)), np.int32)
    for row, work, width in zip(tables, works, widths, strict=True):
        row[:width] = work.sequence.block_ids[:width]
    return tables
