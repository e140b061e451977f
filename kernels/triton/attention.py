"""Attention over the paged cache.

A sequence with few new tokens, as in decode, reads much and computes little: ``decode`` cuts its keys into
parts that are read side by side (Dao et al., 2023). One with many, as in prefill, is cut by queries:
``prefill``. In a step with both, each kernel passes over the other's sequences. Both run the same loop over
keys with a running maximum (Dao et al., 2022), and both put the query heads that share a key head into one
tile, so that keys and values are read once for all of them."""

import torch
from torch import Tensor

from kernels import AttentionBatch
from kernels.triton.decode import MOST_QUERIES, decode
from kernels.triton.launch import with_whole_heads
from kernels.triton.prefill import prefill


def paged_attention(q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, window: int) -> Tensor:
    assert cache.is_floating_point() and cache[0].is_contiguous()  # blocks alone may lie apart
    q = with_whole_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_sequences = batch.context_lens.shape[0]
    if num_sequences == 0 or q.shape[0] == 0:
        return out
    few = 1 if batch.max_query_len == 1 else MOST_QUERIES  # two variants to compile, not four
    log_scale = scale * 1.4426950408889634  # the kernels compute powers of two: log2(e)
    if batch.max_query_len > MOST_QUERIES:
        prefill(q, cache, batch, out, log_scale, window)
    if batch.max_query_len <= MOST_QUERIES or num_sequences > 1:
        decode(q, cache, batch, out, log_scale, window, few)
    return out
