"""Attention of sequences with many new tokens, cut by queries."""

import triton
import triton.language as tl
from torch import Tensor

from kernels import AttentionBatch
from kernels.triton.attend import attend
from kernels.triton.decode import MOST_QUERIES
from kernels.triton.launch import SMALLEST_DOT, power_of_two, tuned

# Rows of a tile (queries times heads that share a key head) and keys in a turn. 128 x 64 at D = 128 keeps
# the tensor cores of a Hopper fed: 64 KiB of running sums in registers of 8 warps; in shared memory the
# queries and three turns of keys and values, 32 KiB each, one that is computed with and two on their way, for
# five stages make two (see decode). The others are for small head dimensions and for GPUs with less shared
# memory.
CONFIGS = [
    triton.Config({"ROWS": 128, "KEYS": 64}, num_warps=8, num_stages=5),
    triton.Config({"ROWS": 64, "KEYS": 64}, num_warps=4, num_stages=5),
    triton.Config({"ROWS": 64, "KEYS": 32}, num_warps=4, num_stages=5),
]
LONG_QUERIES = 256


@triton.autotune(tuned(CONFIGS), key=["GROUPS", "HEADS_PER_GROUP", "HEAD_DIM", "IS_LONG"], cache_results=True)
@triton.jit(do_not_specialize=["stride_table"])  # as for decode
def prefill_kernel(
    q_ptr,  # [T, H, D], rows stride_q apart
    cache_ptr,  # [N, 2, G, B, D], blocks stride_block apart
    tables_ptr,  # [S, max blocks] int32, rows stride_table apart
    starts_ptr,  # [S + 1] int32
    lens_ptr,  # [S] int32
    out_ptr,  # [T, H, D]
    stride_q,
    stride_block,
    stride_table,
    log_scale,
    GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,  # the next power of two
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_LONG: tl.constexpr,  # for the choice of tiles: the best for short prompts may not be for long ones
    FEW: tl.constexpr,  # sequences with so few new tokens are left out
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    # Grid (most query tiles of a sequence, G, S). Tile row r is query r // HEAD_BLOCK, head r % HEAD_BLOCK of
    # the group. Programs behind their sequence's last query end at once. The last tiles, which see the most
    # keys, come first: the others fill the gaps.
    QUERIES: tl.constexpr = ROWS // HEAD_BLOCK
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - begin
    if (num_queries <= FEW) | (tile * QUERIES >= num_queries):
        return
    earlier = tl.load(lens_ptr + sequence) - num_queries
    row = tl.arange(0, ROWS)
    query = tile * QUERIES + row // HEAD_BLOCK
    head = row % HEAD_BLOCK
    dim = tl.arange(0, DIM_BLOCK)
    is_row = (query < num_queries) & (head < HEADS_PER_GROUP)
    inside = is_row[:, None] & (dim[None, :] < HEAD_DIM)
    token = (begin + query).to(tl.int64)
    column = (group * HEADS_PER_GROUP + head) * HEAD_DIM
    q = tl.load(q_ptr + (token * stride_q + column)[:, None] + dim[None, :], mask=inside, other=0.0)
    end = earlier + tl.minimum(num_queries, (tile + 1) * QUERIES)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(0, earlier + tile * QUERIES + 1 - WINDOW)
    sums, _, weights = attend(
        q, earlier + query, cache_ptr + group * BLOCK_SIZE * HEAD_DIM,
        tables_ptr + sequence.to(tl.int64) * stride_table, start, end, GROUPS * BLOCK_SIZE * HEAD_DIM,
        stride_block, log_scale, BLOCK_SIZE, HEAD_DIM, WINDOW, KEYS,
    )  # fmt: skip
    result = sums / tl.where(weights == 0.0, 1.0, weights)[:, None]
    place = out_ptr + (token * (GROUPS * HEADS_PER_GROUP * HEAD_DIM) + column)[:, None] + dim[None, :]
    tl.store(place, result.to(out_ptr.dtype.element_ty), mask=inside)


def prefill(
    q: Tensor, cache: Tensor, batch: AttentionBatch, out: Tensor, log_scale: float, window: int
) -> None:
    """Writes the rows of ``out`` that belong to sequences with more than ``MOST_QUERIES`` new tokens."""
    _, _, num_groups, block_size, head_dim = cache.shape
    num_sequences = batch.context_lens.shape[0]
    heads_per_group = q.shape[1] // num_groups
    head_block = power_of_two(heads_per_group)

    def grid(config: dict[str, int]) -> tuple[int, int, int]:
        tiles = triton.cdiv(batch.max_query_len, config["ROWS"] // head_block)
        return tiles, num_groups, num_sequences

    prefill_kernel[grid](
        q, cache, batch.block_tables, batch.query_starts, batch.context_lens, out,
        q.stride(0), cache.stride(0), batch.block_tables.stride(0), log_scale,
        GROUPS=num_groups, HEADS_PER_GROUP=heads_per_group, HEAD_BLOCK=head_block, HEAD_DIM=head_dim,
        DIM_BLOCK=max(SMALLEST_DOT, power_of_two(head_dim)), BLOCK_SIZE=block_size, WINDOW=window,
        IS_LONG=batch.max_query_len > LONG_QUERIES, FEW=MOST_QUERIES,
    )  # fmt: skip
