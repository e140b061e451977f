"""Attention of sequences with few new tokens, their keys cut into parts (Dao et al., 2023).

With one sequence and 8 key heads a GPU of 132 processors would read with 8 of them. So the keys of each are
cut into parts, as many as make two programs for every processor, and ``combine`` puts the parts together. How
many there are follows from the number of sequences alone, not from their lengths: a recorded launch holds for
all of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import AttentionBatch
from kernels.triton.attend import attend
from kernels.triton.launch import SMALLEST_DOT, power_of_two

MOST_QUERIES = 8  # new tokens of a sequence: a token and seven drafts
MOST_PARTS = 32
PROGRAMS = 256  # two for each of the 132 processors of an H100 or H200, nearly
# 64 keys and values of 128 dimensions in 16 bits are 32 KiB. They are asked for once their block is known: of
# five stages two turns of the loop are on their way at any time, and two or three programs fit a processor.
# That is four times what covers the latency of its memory, about 25 KiB a processor.
TURN_BYTES, STAGES = 32 << 10, 5


@triton.jit(do_not_specialize=["stride_table"])  # grows with the longest sequence: no reason to compile anew
def decode_kernel(
    q_ptr,  # [T, H, D], rows stride_q apart
    cache_ptr,  # [N, 2, G, B, D], blocks stride_block apart
    tables_ptr,  # [S, max blocks] int32, rows stride_table apart
    starts_ptr,  # [S + 1] int32
    lens_ptr,  # [S] int32
    out_ptr,  # [T, H, D], written where there is one part
    sums_ptr,  # [S, FEW, H, PARTS, D] float32, written where there are several
    scores_ptr,  # [S, FEW, H, PARTS] float32: log2 of the sum of weights; -inf: no key
    stride_q,
    stride_block,
    stride_table,
    log_scale,
    GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FEW: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,  # FEW * HEAD_BLOCK, at least 16
    KEYS: tl.constexpr,
):
    # Grid (PARTS, G, S). Tile row r is query r // HEAD_BLOCK, head r % HEAD_BLOCK of the group.
    HEADS: tl.constexpr = GROUPS * HEADS_PER_GROUP
    part = tl.program_id(0)
    group = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - begin
    if (num_queries > FEW) | (num_queries == 0):
        return
    context_len = tl.load(lens_ptr + sequence)
    row = tl.arange(0, ROWS)
    query = row // HEAD_BLOCK
    head = row % HEAD_BLOCK
    dim = tl.arange(0, DIM_BLOCK)
    is_row = (query < num_queries) & (head < HEADS_PER_GROUP)
    inside = is_row[:, None] & (dim[None, :] < HEAD_DIM)
    token = (begin + query).to(tl.int64)
    head = group * HEADS_PER_GROUP + head
    q = tl.load(q_ptr + (token * stride_q + head * HEAD_DIM)[:, None] + dim[None, :], mask=inside, other=0.0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, context_len - num_queries + 1 - WINDOW)
    length = tl.cdiv(tl.cdiv(context_len - first, PARTS), KEYS) * KEYS
    start = first + part * length
    sums, largest, weights = attend(
        q, context_len - num_queries + query, cache_ptr + group * BLOCK_SIZE * HEAD_DIM,
        tables_ptr + sequence.to(tl.int64) * stride_table, start, tl.minimum(start + length, context_len),
        GROUPS * BLOCK_SIZE * HEAD_DIM, stride_block, log_scale, BLOCK_SIZE, HEAD_DIM, WINDOW, KEYS,
    )  # fmt: skip
    some = tl.where(weights == 0.0, 1.0, weights)
    result = sums / some[:, None]
    if PARTS == 1:
        place = out_ptr + ((token * HEADS + head) * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(place, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        cell = ((sequence.to(tl.int64) * FEW + query) * HEADS + head) * PARTS + part
        tl.store(sums_ptr + (cell * HEAD_DIM)[:, None] + dim[None, :], result, mask=inside)
        tl.store(scores_ptr + cell, largest + tl.log2(some), mask=is_row)


@triton.jit
def combine_kernel(
    sums_ptr,  # [S, FEW, H, PARTS, D]
    scores_ptr,  # [S, FEW, H, PARTS]
    starts_ptr,  # [S + 1]
    out_ptr,  # [T, H, D]
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    PARTS: tl.constexpr,
):
    # Grid (H, FEW, S): a tile of PARTS x D, at most 32 x 128 values.
    head = tl.program_id(0)
    query = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - begin
    if (num_queries > FEW) | (query >= num_queries):
        return
    heads = tl.num_programs(0)
    part = tl.arange(0, PARTS)
    dim = tl.arange(0, DIM_BLOCK)
    cell = ((sequence.to(tl.int64) * FEW + query) * heads + head) * PARTS + part
    scores = tl.load(scores_ptr + cell)
    largest = tl.max(scores, 0)
    shares = tl.exp2(scores - tl.where(largest == float("-inf"), 0.0, largest))
    inside = (shares[:, None] > 0.0) & (dim[None, :] < HEAD_DIM)
    sums = tl.load(sums_ptr + (cell * HEAD_DIM)[:, None] + dim[None, :], mask=inside, other=0.0)
    total = tl.sum(shares, 0)
    result = tl.sum(sums * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    place = out_ptr + ((begin + query).to(tl.int64) * heads + head) * HEAD_DIM + dim
    tl.store(place, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def num_parts(num_sequences: int, num_groups: int) -> int:
    """The largest power of two that gives no more than ``PROGRAMS`` programs."""
    most = max(1, PROGRAMS // (num_sequences * num_groups))
    return min(MOST_PARTS, 1 << (most.bit_length() - 1))


def decode(
    q: Tensor, cache: Tensor, batch: AttentionBatch, out: Tensor, log_scale: float, window: int, few: int
) -> None:
    """Writes the rows of ``out`` that belong to sequences with at most ``few`` new tokens, a power of two."""
    _, _, num_groups, block_size, head_dim = cache.shape
    num_sequences, num_heads = batch.context_lens.shape[0], q.shape[1]
    head_block = power_of_two(num_heads // num_groups)
    parts = num_parts(num_sequences, num_groups)
    cells = num_sequences * few * num_heads * parts if parts > 1 else 0
    sums = torch.empty(cells, head_dim, dtype=torch.float32, device=q.device)
    scores = torch.empty(cells, dtype=torch.float32, device=q.device)
    dim_block = max(SMALLEST_DOT, power_of_two(head_dim))
    keys = max(SMALLEST_DOT, min(64, TURN_BYTES // (2 * dim_block * cache.element_size())))
    decode_kernel[(parts, num_groups, num_sequences)](
        q, cache, batch.block_tables, batch.query_starts, batch.context_lens, out, sums, scores,
        q.stride(0), cache.stride(0), batch.block_tables.stride(0), log_scale,
        GROUPS=num_groups, HEADS_PER_GROUP=num_heads // num_groups, HEAD_BLOCK=head_block,
        HEAD_DIM=head_dim, DIM_BLOCK=dim_block, BLOCK_SIZE=block_size, WINDOW=window, FEW=few,
        PARTS=parts, ROWS=max(SMALLEST_DOT, few * head_block), KEYS=keys, num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    if parts > 1:
        combine_kernel[(num_heads, few, num_sequences)](
            sums, scores, batch.query_starts, out, HEAD_DIM=head_dim, DIM_BLOCK=dim_block, FEW=few,
            PARTS=parts,
        )  # fmt: skip
