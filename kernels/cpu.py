"""The operations in plain PyTorch: what every other implementation is tested against, and what runs on CPUs.

Written for clarity first, but a worker without a GPU serves real requests with it: attention gathers no more
blocks than a sequence has, key/value heads are never repeated in memory, and sequences that decode are
computed together.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionBatch, Forward, LayerWeights, LinearWeight
from kernels.quantization import BlockWeight, Quantization, check_range, on_grid

RUN_BYTES = 1 << 20  # keys and values of the sequences whose attention is computed at once


def pack_linear(
    weight: Tensor | BlockWeight, bias: Tensor | None, kind: Quantization | None = None
) -> LinearWeight:
    if isinstance(weight, BlockWeight):
        check_range(weight.largest(), weight.kind)
        weight = weight.values()
    elif kind is not None:
        weight = on_grid(weight, kind)
    return LinearWeight((weight,), bias, weight.shape[1], weight.shape[0])


def linear(x: Tensor, weight: LinearWeight, dtype: torch.dtype | None = None) -> Tensor:
    return F.linear(x, weight.data[0], weight.bias).to(dtype or x.dtype)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, token_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2]
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def store_kv(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    blocks, offsets = slots // cache.shape[3], slots % cache.shape[3]
    cache[blocks, 0, :, offsets] = as_cached(k, cache.dtype)
    cache[blocks, 1, :, offsets] = as_cached(v, cache.dtype)


def as_cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [..., D] as a cache of ``dtype`` holds it: int8 is [..., D + 4], the largest magnitude 127, and
    the bytes of the float32 scale behind the numbers."""
    if dtype != torch.int8:
        return x.to(dtype)
    most = x.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
    return torch.cat([(x * inverse).round().to(torch.int8), (most / 127).view(torch.int8)], dim=-1)


def from_cached(kv: Tensor, dtype: torch.dtype) -> Tensor:
    if kv.dtype != torch.int8:
        return kv.to(dtype)
    return (kv[..., :-4] * kv[..., -4:].contiguous().view(torch.float32)).to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def fuse(
    layers: Sequence[LayerWeights],
    embedding: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> Forward | None:
    return None  # operation by operation is what specifies


def paged_attention(q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, window: int) -> Tensor:
    out = q.new_empty(q.shape)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    for first, end in runs(starts, lens, cache):
        rows = slice(starts[first], starts[end])
        tables = batch.block_tables[first:end]
        out[rows] = attend(q[rows], cache, tables, lens[first:end], scale, window)
    return out


def runs(starts: list[int], lens: list[int], cache: Tensor) -> Iterator[tuple[int, int]]:
    """Neighbouring sequences that are computed at once: equally many queries each, and together so few keys,
    padded to the longest, that they stay in a core's own cache. A long context is a run of its own."""
    _, _, num_groups, block_size, head_dim = cache.shape
    most_keys = RUN_BYTES // (2 * num_groups * head_dim * cache.element_size())
    first = longest = 0
    for sequence, context_len in enumerate(lens):
        longest = max(longest, context_len)
        alike = starts[sequence + 1] - starts[sequence] == starts[first + 1] - starts[first]
        if sequence > first and not (alike and (sequence + 1 - first) * (longest + block_size) <= most_keys):
            yield first, sequence
            first, longest = sequence, context_len
    if lens:
        yield first, len(lens)


def attend(q: Tensor, cache: Tensor, tables: Tensor, lens: list[int], scale: float, window: int) -> Tensor:
    """``q`` [S * n, H, D]: the last n tokens of each of S sequences of ``lens`` tokens -> [S * n, H, D]."""
    num_sequences, num_queries = len(lens), q.shape[0] // len(lens)
    seen_from = max(0, min(lens) - num_queries + 1 - window) if window else 0
    start, end = seen_from - seen_from % cache.shape[3], max(lens)
    kv = from_cached(gather(cache, tables, start, end), q.dtype)  # [S, 2, G, keys, D]
    keys = torch.arange(start, end, device=q.device)
    context_lens = torch.tensor(lens, device=q.device)[:, None]
    for sequence, context_len in enumerate(lens):
        kv[sequence, :, :, context_len - start :].zero_()  # behind its last token is anything, NaN included
    mask = None
    first_chunk = num_sequences == 1 and num_queries == end and not window
    if not first_chunk and (num_sequences > 1 or num_queries > 1 or window):
        queries = (context_lens - num_queries + torch.arange(num_queries, device=q.device))[
            ..., None
        ]  # [S, n, 1]
        mask = (keys <= queries) & (keys > queries - window) if window else keys <= queries
        mask = mask[:, None]  # [S, 1, n, keys]
    per_sequence = q.view(num_sequences, num_queries, *q.shape[1:]).transpose(1, 2)  # [S, H, n, D]
    result = F.scaled_dot_product_attention(
        per_sequence, kv[:, 0], kv[:, 1], mask, is_causal=first_chunk, scale=scale, enable_gqa=True
    )
    return result.transpose(1, 2).reshape(q.shape)


def gather(cache: Tensor, tables: Tensor, start: int, end: int) -> Tensor:
    """Keys and values [S, 2, G, end - start, D] at the positions from ``start``, a multiple of the block
    size."""
    num_blocks, _, num_groups, block_size, head_dim = cache.shape
    # Copied as rows, one for what a block holds of one head: several times faster than indexing five
    # dimensions.
    row_len = block_size * head_dim
    rows_per_block = cache.stride(0) // row_len
    rows = cache.as_strided(((num_blocks - 1) * rows_per_block + 2 * num_groups, row_len), (row_len, 1))
    tables = tables[:, start // block_size : -(-end // block_size)].long()
    heads = torch.arange(2 * num_groups, device=cache.device)[:, None]
    index = tables[:, None, :] * rows_per_block + heads  # [S, 2 * G, blocks]
    kv = rows.index_select(0, index.flatten()).view(len(tables), 2, num_groups, -1, head_dim)
    return kv[:, :, :, : end - start]
