"""Keys and values of new tokens into the paged cache."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two, with_whole_heads


@triton.jit
def store_kernel(
    k_ptr,  # [T, G, D], rows stride_k apart
    v_ptr,  # [T, G, D], rows stride_v apart
    cache_ptr,  # [N, 2, G, B, D], blocks stride_block apart
    slots_ptr,  # [T] int64
    stride_k,
    stride_v,
    stride_block,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    # Grid (T,). A program writes a token's heads, D values each in one piece: 8 heads of 128 are a tile of
    # 1,024 values.
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    head = tl.arange(0, GROUP_BLOCK)[:, None]
    at = tl.arange(0, DIM_BLOCK)[None, :]
    inside = (head < GROUPS) & (at < HEAD_DIM)
    source = head * HEAD_DIM + at
    k = tl.load(k_ptr + row * stride_k + source, mask=inside)
    v = tl.load(v_ptr + row * stride_v + source, mask=inside)
    offset = (slot % BLOCK_SIZE) * HEAD_DIM
    place = cache_ptr + (slot // BLOCK_SIZE) * stride_block + offset + head * (BLOCK_SIZE * HEAD_DIM) + at
    kind = cache_ptr.dtype.element_ty
    tl.store(place, k.to(tl.float32).to(kind), mask=inside)
    tl.store(place + GROUPS * BLOCK_SIZE * HEAD_DIM, v.to(tl.float32).to(kind), mask=inside)


def store_kv(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    assert cache.is_floating_point() and cache[0].is_contiguous()  # blocks alone may lie apart
    k, v = with_whole_heads(k), with_whole_heads(v)
    num_rows, num_groups, head_dim = k.shape
    if num_rows:
        store_kernel[(num_rows,)](
            k,
            v,
            cache,
            slots,
            k.stride(0),
            v.stride(0),
            cache.stride(0),
            GROUPS=num_groups,
            BLOCK_SIZE=cache.shape[3],
            HEAD_DIM=head_dim,
            GROUP_BLOCK=power_of_two(num_groups),
            DIM_BLOCK=power_of_two(head_dim),
        )
