"""The operations in plain PyTorch: what every other implementation is tested against, and what runs on CPUs.

Written for clarity first, but a worker without a GPU serves real requests with it: attention gathers no more
blocks than a sequence has, key/value heads are never repeated in memory, and sequences that decode are
computed together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionBatch, LinearWeight


def pack_linear(weight: Tensor, bias: Tensor | None) -> LinearWeight:
    return LinearWeight((weight,), bias, weight.shape[1], weight.shape[0])


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    return F.linear(x, weight.data[0], weight.bias)


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
    cache[blocks, 0, :, offsets] = k.to(cache.dtype)
    cache[blocks, 1, :, offsets] = v.to(cache.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def paged_attention(q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, window: int) -> Tensor:
    out = torch.empty_like(q)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    for sequence, context_len in enumerate(lens):
        rows = slice(starts[sequence], starts[sequence + 1])
        out[rows] = attend(q[rows], cache, batch.block_tables[sequence], context_len, scale, window)
    return out


def attend(q: Tensor, cache: Tensor, table: Tensor, context_len: int, scale: float, window: int) -> Tensor:
    """One sequence: ``q`` [n, H, D], the last n of its ``context_len`` tokens -> [n, H, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_groups, block_size = cache.shape[2], cache.shape[3]
    seen_from = max(0, context_len - num_queries + 1 - window) if window else 0
    first_block = seen_from // block_size
    blocks = table[first_block : -(-context_len // block_size)]
    start = first_block * block_size  # position of the first key gathered
    k, v = gather(cache, blocks, context_len - start)  # [G, keys, D]
    grouped = q.view(num_queries, num_groups, -1, head_dim).permute(1, 2, 0, 3)  # [G, H / G, n, D]
    mask = visible(num_queries, context_len, start, window, q.device)
    per_head = (num_groups, num_heads // num_groups, k.shape[1], head_dim)
    result = F.scaled_dot_product_attention(
        grouped, k.unsqueeze(1).expand(per_head), v.unsqueeze(1).expand(per_head), attn_mask=mask, scale=scale
    )
    return result.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def gather(cache: Tensor, blocks: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Keys and values [G, num_keys, D] of ``blocks``. What lies behind the last token is never read: it may
    be NaN."""
    by_group = cache.permute(1, 2, 0, 3, 4)  # [2, G, N, B, D]
    k, v = (part.index_select(1, blocks).flatten(1, 2)[:, :num_keys] for part in by_group)
    return k, v


def visible(
    num_queries: int, context_len: int, start: int, window: int, device: torch.device
) -> Tensor | None:
    """[queries, keys] bool, keys counted from position ``start``; None when every query sees every key."""
    if num_queries == 1 and not window:
        return None
    queries = torch.arange(context_len - num_queries, context_len, device=device)[:, None]
    keys = torch.arange(start, context_len, device=device)[None, :]
    mask = keys <= queries
    return mask & (keys > queries - window) if window else mask
