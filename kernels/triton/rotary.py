"""Rotary positions, in place (Su et al., 2021)."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two, with_whole_heads


@triton.jit
def rotary_kernel(
    x_ptr,  # [T, heads, D], rows stride_x apart, overwritten
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max positions, D] float32
    stride_x,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    # Grid (T,). A program turns all heads of a token, for they share its angles: 32 heads of 128 are two
    # tiles of 2,048 values.
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, HALF_BLOCK)
    head = tl.arange(0, HEAD_BLOCK)
    angles = cos_sin_ptr + tl.load(positions_ptr + row) * HEAD_DIM + pair
    cos = tl.load(angles, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(angles + half, mask=pair < half, other=0.0)[None, :]
    inside = (head[:, None] < HEADS) & (pair[None, :] < half)
    place = x_ptr + row * stride_x + head[:, None] * HEAD_DIM + pair[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    tl.store(place, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(place + half, (second * cos + first * sin).to(kind), mask=inside)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrites ``q`` and ``k`` where their heads lie side by side."""
    return rotate(q, positions, cos_sin), rotate(k, positions, cos_sin)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    x = with_whole_heads(x)
    num_rows, num_heads, head_dim = x.shape
    if num_rows:
        rotary_kernel[(num_rows,)](
            x,
            positions,
            cos_sin,
            x.stride(0),
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=power_of_two(num_heads),
            HALF_BLOCK=power_of_two(head_dim // 2),
        )
    return x
