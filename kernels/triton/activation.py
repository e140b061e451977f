"""The gate of the feed-forward part."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two

BLOCK = 1024  # 8 values a thread with 4 warps: 16 bytes of bfloat16, the widest load there is


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2 * I]
    out_ptr,  # [T, I]
    width,
    BLOCK: tl.constexpr,
):
    # Grid (T, I / BLOCK).
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    kind = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + row * width + at, (silu * up).to(kind), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if out.numel():
        block = min(BLOCK, power_of_two(width))
        silu_mul_kernel[(num_rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out
