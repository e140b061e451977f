"""Weights of eight or four bits, with a scale, or a scale and an offset, for every 32 inputs of an output.

They are read as they lie and made wide in registers, a tile at a time: with few rows the time of a product is
that of reading its weights. Weights in the activations' own type are cuBLAS's business."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import LinearWeight
from kernels.quantization import (
    GROUP,
    INT4_FACTOR,
    BlockWeight,
    Quantization,
    check_range,
    in_groups,
    int4_numbers,
    int8_numbers,
)
from kernels.triton.launch import SMALLEST_DOT, power_of_two, tuned

# Outputs of a program. Few rows need many programs to read with, many rows want large tiles to multiply.
CONFIGS = [
    triton.Config({"OUTPUTS": 64}, num_warps=4, num_stages=4),
    triton.Config({"OUTPUTS": 32}, num_warps=2, num_stages=5),
    triton.Config({"OUTPUTS": 128}, num_warps=8, num_stages=3),
]


@triton.autotune(tuned(CONFIGS), key=["num_inputs", "num_outputs", "ROWS"], cache_results=True)
@triton.jit(do_not_specialize=["num_rows"])  # another one each step
def quantized_linear_kernel(
    x_ptr,  # [T, I]
    weight_ptr,  # [O, padded I] int8, or [O, padded I / 2] uint8
    scales_ptr,  # [O, padded I / 32] float16, 256 times the scale for four bits
    least_ptr,  # the same, for four bits: what 0 stands for
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
    # Grid (T / ROWS, O / OUTPUTS): a tile of ROWS x OUTPUTS, 64 inputs in a turn. The nibbles of a byte are
    # an input of each of two neighbouring groups, so that either half of a byte makes a tile of its own.
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
                least = tl.load(least_ptr + scale_at, mask=is_output, other=0.0).to(tl.float32)
                number = ((packed >> (4 * half)) & 15).to(tl.float32)
                weight = (number * scale[:, None] + least[:, None]) / 256
            else:
                place = weight_ptr + ((line + step) * 64 + half * 32)[:, None] + lane[None, :]
                weight = tl.load(place, mask=is_output[:, None], other=0).to(tl.float32) * scale[:, None]
            sums += tl.dot(x, tl.trans(weight.to(kind)), input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(place, sums.to(out_ptr.dtype.element_ty), mask=is_row & is_output[None, :])


def pack_linear(
    weight: Tensor | BlockWeight, bias: Tensor | None, kind: Quantization | None = None
) -> LinearWeight:
    num_outputs, num_inputs = weight.shape
    if isinstance(weight, BlockWeight):
        check_range(weight.largest(), weight.kind)
        least = weight.least() if weight.kind == "int4" else None
        data = pack(weight.numbers(), weight.halves(0), least)
    elif kind == "int8":
        data = pack(*int8_numbers(in_groups(weight, kind)), None)
    elif kind == "int4":
        data = pack(*int4_numbers(in_groups(weight, kind)))
    else:
        data = (weight,)
    return LinearWeight(data, bias, num_inputs, num_outputs)


def pack(numbers: Tensor, scale: Tensor, least: Tensor | None) -> tuple[Tensor, ...]:
    """``numbers`` [O, groups, 32], ``scale`` and ``least`` [O, groups, 1], as the kernel reads them."""
    if numbers.shape[1] % 2:
        numbers, scale = F.pad(numbers, (0, 0, 0, 1)), F.pad(scale, (0, 0, 0, 1))
        least = None if least is None else F.pad(least, (0, 0, 0, 1))
    if least is None:
        return numbers.to(torch.int8).flatten(1), scale.half().flatten(1)
    low, high = numbers.to(torch.uint8).view(len(numbers), -1, 2, GROUP).unbind(2)
    factored = [(tensor * INT4_FACTOR).half().flatten(1) for tensor in (scale, least)]
    return (low | high << 4).flatten(1), *factored


def linear(x: Tensor, weight: LinearWeight, dtype: torch.dtype | None = None) -> Tensor:
    if len(weight.data) == 1:
        return F.linear(x, weight.data[0], weight.bias).to(dtype or x.dtype)
    numbers, scales, least = weight.data if len(weight.data) == 3 else (*weight.data, weight.data[1])
    assert x.is_contiguous() and x.shape[1] == weight.in_features
    num_rows = x.shape[0]
    out = torch.empty(num_rows, weight.out_features, dtype=dtype or x.dtype, device=x.device)
    rows = max(SMALLEST_DOT, min(64, power_of_two(num_rows)))

    def grid(config: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(num_rows, rows), triton.cdiv(weight.out_features, config["OUTPUTS"])

    if out.numel():
        quantized_linear_kernel[grid](
            x, numbers, scales, least, x if weight.bias is None else weight.bias, out,
            num_rows, weight.in_features, weight.out_features, IS_INT4=len(weight.data) == 3,
            HAS_BIAS=weight.bias is not None, ROWS=rows,
        )  # fmt: skip
    return out
