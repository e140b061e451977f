"""Weights of eight or four bits, with a scale, or a scale and an offset, for every 32 inputs of an output.

They are read as they lie and made wide in registers, a tile at a time: with few rows the time of a product is
that of reading its weights. Weights in the activations' own type are cuBLAS's business."""

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import LinearWeight
from kernels.triton.launch import SMALLEST_DOT, power_of_two, tuned

Quantization = Literal["int8", "int4"]
GROUP = 32  # inputs that share a scale, as in GGUF's Q8_0 and Q4_1
STEP = 2 * GROUP  # inputs in a turn: the nibbles of a byte are one input of each of two groups

# Outputs of a program. Few rows need many programs to read with, many rows want large tiles to multiply.
CONFIGS = [
    triton.Config({"OUTPUTS": 64}, num_warps=4, num_stages=4),
    triton.Config({"OUTPUTS": 32}, num_warps=2, num_stages=5),
    triton.Config({"OUTPUTS": 128}, num_warps=8, num_stages=3),
]


@triton.autotune(tuned(CONFIGS), key=["num_inputs", "num_outputs", "ROWS"], cache_results=True)
@triton.jit
def quantized_linear_kernel(
    x_ptr,  # [T, I]
    weight_ptr,  # [O, padded I] int8, or [O, padded I / 2] uint8
    scales_ptr,  # [O, padded I / 32] float16
    offsets_ptr,  # the same, for four bits
    bias_ptr,  # [O]
    out_ptr,  # [T, O]
    num_rows,
    num_inputs,
    num_outputs,
    IS_INT4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    # Grid (T / ROWS, O / OUTPUTS): a tile of ROWS x OUTPUTS, 64 inputs in a turn.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, 32)
    is_row, is_output = (row < num_rows)[:, None], output < num_outputs
    num_steps = tl.cdiv(num_inputs, 64)
    x_row = x_ptr + row.to(tl.int64)[:, None] * num_inputs
    line = output.to(tl.int64) * num_steps  # in units of what a turn reads of a row
    kind = x_ptr.dtype.element_ty
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for step in range(num_steps):
        if IS_INT4:
            place = weight_ptr + ((line + step) * 32)[:, None] + lane[None, :]
            packed = tl.load(place, mask=is_output[:, None], other=0)  # [OUTPUTS, 32]
        for half in tl.static_range(2):
            at = step * 64 + half * 32 + lane
            x = tl.load(x_row + at[None, :], mask=is_row & (at < num_inputs)[None, :], other=0.0)
            scale_at = (line + step) * 2 + half
            scale = tl.load(scales_ptr + scale_at, mask=is_output, other=0.0).to(tl.float32)
            if IS_INT4:
                offset = tl.load(offsets_ptr + scale_at, mask=is_output, other=0.0).to(tl.float32)
                whole = ((packed >> (4 * half)) & 15).to(tl.float32)
                weight = whole * scale[:, None] + offset[:, None]
            else:
                place = weight_ptr + ((line + step) * 64 + half * 32)[:, None] + lane[None, :]
                weight = tl.load(place, mask=is_output[:, None], other=0).to(tl.float32) * scale[:, None]
            sums += tl.dot(x, tl.trans(weight.to(kind)), input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(place, sums.to(out_ptr.dtype.element_ty), mask=is_row & is_output[None, :])


def pack_linear(weight: Tensor, bias: Tensor | None, kind: Quantization | None = None) -> LinearWeight:
    """``weight`` [O, I] as it is, or as whole numbers of the ``kind``, nearest to it."""
    num_outputs, num_inputs = weight.shape
    if kind is None:
        return LinearWeight((weight,), bias, num_inputs, num_outputs)
    padded = F.pad(weight.float(), (0, -num_inputs % STEP))
    groups = padded.view(num_outputs, -1, GROUP)
    data = quantize_int8(groups) if kind == "int8" else quantize_int4(groups)
    return LinearWeight(data, bias, num_inputs, num_outputs)


def quantize_int8(groups: Tensor) -> tuple[Tensor, ...]:
    """[O, groups, 32] -> whole numbers [O, groups * 32] int8, scales [O, groups]."""
    scales = (groups.abs().amax(-1) / 127).half()
    whole = torch.round(groups / nonzero(scales)[..., None]).clamp(-127, 127)
    return whole.to(torch.int8).flatten(1), scales


def quantize_int4(groups: Tensor) -> tuple[Tensor, ...]:
    """[O, groups, 32] -> pairs of whole numbers [O, groups * 16] uint8, scales and offsets [O, groups]."""
    offsets = groups.amin(-1).half()
    scales = ((groups.amax(-1) - offsets.float()) / 15).half()
    whole = torch.round((groups - offsets.float()[..., None]) / nonzero(scales)[..., None])
    low, high = whole.clamp(0, 15).to(torch.uint8).view(len(groups), -1, 2, GROUP).unbind(2)
    return (low | high << 4).flatten(1), scales, offsets


def nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1, scales.float())


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    if len(weight.data) == 1:
        return F.linear(x, weight.data[0], weight.bias)
    whole, scales, offsets = weight.data if len(weight.data) == 3 else (*weight.data, weight.data[1])
    assert x.is_contiguous() and x.shape[1] == weight.in_features
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, weight.out_features)
    rows = max(SMALLEST_DOT, min(64, power_of_two(num_rows)))

    def grid(config: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(num_rows, rows), triton.cdiv(weight.out_features, config["OUTPUTS"])

    if out.numel():
        quantized_linear_kernel[grid](
            x, whole, scales, offsets, x if weight.bias is None else weight.bias, out,
            num_rows, weight.in_features, weight.out_features, IS_INT4=len(weight.data) == 3,
            HAS_BIAS=weight.bias is not None, ROWS=rows,
        )  # fmt: skip
    return out
