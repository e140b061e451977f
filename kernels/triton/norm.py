"""RMSNorm, alone and with the residual's sum (Zhang and Sennrich, 2019)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two, with_whole_heads


@triton.jit
def norm_kernel(
    x_ptr,  # [T, heads, W]: rows of W, T of them stride_x apart
    residual_ptr,  # [T, W]
    weight_ptr,  # [W]
    out_ptr,  # [T * heads, W]
    total_ptr,  # [T, W]
    stride_x,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    # Grid (T, heads). A program holds its whole row in registers (8,192 values are 32 a thread with 8 warps),
    # so that x is read once.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = tl.load(x_ptr + row * stride_x + head * WIDTH + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * WIDTH + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(x_ptr.dtype.element_ty).to(tl.float32)  # rounded where the specification does
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out_row = row * tl.num_programs(1) + head
    tl.store(out_ptr + out_row * WIDTH + at, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = with_whole_heads(x if x.dim() == 3 else x.unsqueeze(1))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(heads, None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        launch(x.unsqueeze(1), residual, weight, out, total, eps)
    return out, total


def launch(
    heads: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float
) -> None:
    num_rows, num_heads, width = heads.shape
    block = power_of_two(width)
    norm_kernel[(num_rows, num_heads)](
        heads,
        heads if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        heads.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=8 if block >= 2048 else 4 if block >= 512 else 1,
    )
