"""Steps of any shape, to test and time attention with."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import AttentionBatch


class Shape(NamedTuple):
    num_groups: int
    heads_per_group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


class Step(NamedTuple):
    q: Tensor  # [T, H, D]
    cache: Tensor  # [N, 2, G, B, D], one of two layers: blocks lie apart
    batch: AttentionBatch

    def wide(self) -> "Step":
        return Step(self.q.float(), self.cache.float(), self.batch)


def make_step(sequences: list[tuple[int, int]], shape: Shape, seed: int = 0) -> Step:
    """``sequences``: (queries, tokens) each. Blocks lie in any order; where no token is, NaN is."""
    generator = torch.Generator().manual_seed(seed)
    groups, heads_per_group, head_dim, block_size, dtype = shape
    widths = [-(-tokens // block_size) for _, tokens in sequences]
    order = torch.randperm(sum(widths) + 2, generator=generator)
    tables = torch.zeros(len(sequences), max([1, *widths]), dtype=torch.int32)
    layers = torch.full((len(order), 2, 2, groups, block_size, head_dim), torch.nan, dtype=dtype)
    cache, used = layers[:, 1], 0
    slots, positions = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for row, (queries, tokens) in enumerate(sequences):
        blocks = order[used : used + widths[row]]
        tables[row, : len(blocks)], used = blocks, used + len(blocks)
        at = torch.arange(tokens)
        content = torch.randn(tokens, 2, groups, head_dim, generator=generator).to(dtype)
        cache[blocks[at // block_size], :, :, at % block_size] = content
        slots.append(
            blocks[at // block_size][tokens - queries :] * block_size + (at % block_size)[tokens - queries :]
        )
        positions.append(at[tokens - queries :])
    counts = [queries for queries, _ in sequences]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lens = torch.tensor([tokens for _, tokens in sequences], dtype=torch.int32)
    batch = AttentionBatch(
        starts, lens, tables, torch.cat(slots), torch.cat(positions), max(counts), max(lens.tolist())
    )
    # Queries are the first of wider rows, as those of a model are.
    rows = torch.randn(sum(counts), groups * (heads_per_group + 2), head_dim, generator=generator).to(dtype)
    return Step(rows[:, : groups * heads_per_group], cache, batch)
