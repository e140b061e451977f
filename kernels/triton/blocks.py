"""Runs of blocks out of the cache and back into it, for transfers.

A block is contiguous, but blocks are small and lie anywhere: gathered into one buffer, many of them cross the
bus in one copy. On the way they can change their type, or be quantized with a scale for each row, the values
of one head at one position."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two

TILE = 4096  # values of a program: 32 a thread with 4 warps, four loads of 16 bytes under way


@triton.jit
def tile(NUM_ROWS, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Of a block: this program's rows [ROWS], where in the block their values lie, and which of these places
    are inside it, [ROWS, DIM_BLOCK] both."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_BLOCK)
    inside = (row < NUM_ROWS)[:, None] & (dim < HEAD_DIM)[None, :]
    return row, row[:, None] * HEAD_DIM + dim[None, :], inside


@triton.jit
def gather_kernel(
    cache_ptr,  # [N, R, D]
    ids_ptr,  # [n] int64
    out_ptr,  # [n, R, D]
    scales_ptr,  # [n, R] float32
    NUM_ROWS,
    LARGEST: tl.constexpr,  # of the quantized type; 0: a plain change of type
    IS_INTEGER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Grid (n, R / ROWS): a tile of ROWS x D.
    index = tl.program_id(0).to(tl.int64)
    source = tl.load(ids_ptr + index)
    row, at, inside = tile(NUM_ROWS, HEAD_DIM, DIM_BLOCK, ROWS)
    size = NUM_ROWS * HEAD_DIM
    values = tl.load(cache_ptr + source * size + at, mask=inside, other=0.0).to(tl.float32)
    if LARGEST > 0:
        scales = tl.max(tl.abs(values), 1) / LARGEST
        values = values / tl.where(scales == 0.0, 1.0, scales)[:, None]
        if IS_INTEGER:  # halves away from zero: conversion cuts
            values = values + tl.where(values >= 0.0, 0.5, -0.5)
        tl.store(scales_ptr + index * NUM_ROWS + row, scales, mask=row < NUM_ROWS)
    tl.store(out_ptr + index * size + at, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scatter_kernel(
    values_ptr,  # [n, R, D]
    scales_ptr,  # [n, R] float32
    ids_ptr,  # [n] int64
    cache_ptr,  # [N, R, D]
    NUM_ROWS,
    HAS_SCALES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Grid (n, R / ROWS): a tile of ROWS x D.
    index = tl.program_id(0).to(tl.int64)
    target = tl.load(ids_ptr + index)
    row, at, inside = tile(NUM_ROWS, HEAD_DIM, DIM_BLOCK, ROWS)
    size = NUM_ROWS * HEAD_DIM
    values = tl.load(values_ptr + index * size + at, mask=inside).to(tl.float32)
    if HAS_SCALES:
        scales = tl.load(scales_ptr + index * NUM_ROWS + row, mask=row < NUM_ROWS, other=0.0)
        values = values * scales[:, None]
    tl.store(cache_ptr + target * size + at, values.to(cache_ptr.dtype.element_ty), mask=inside)


def gather_blocks(cache: Tensor, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks ``block_ids`` [n] int64 of ``cache`` [N, R, D], in ``dtype`` -> [n, R, D]."""
    out = torch.empty(len(block_ids), *cache.shape[1:], dtype=dtype, device=cache.device)
    launch_gather(cache, block_ids, out, out, 0.0)
    return out


def quantize_blocks(cache: Tensor, block_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The blocks as int8 or float8_e4m3fn [n, R, D], and their scales [n, R] float32: the largest value of a
    row becomes the largest of the type."""
    out = torch.empty(len(block_ids), *cache.shape[1:], dtype=dtype, device=cache.device)
    scales = torch.empty(out.shape[:2], dtype=torch.float32, device=cache.device)
    largest = float(torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max)
    launch_gather(cache, block_ids, out, scales, largest)
    return out, scales


def launch_gather(cache: Tensor, block_ids: Tensor, out: Tensor, scales: Tensor, largest: float) -> None:
    assert cache.is_contiguous() and out.is_contiguous()
    if out.numel():
        grid, shape = tiles(cache, len(block_ids))
        is_integer = not out.dtype.is_floating_point
        gather_kernel[grid](
            cache, block_ids, out, scales, cache.shape[1], LARGEST=largest, IS_INTEGER=is_integer, **shape
        )


def scatter_blocks(values: Tensor, scales: Tensor | None, block_ids: Tensor, cache: Tensor) -> None:
    """Write ``values`` [n, R, D], times ``scales`` [n, R] if there are any, into the blocks ``block_ids`` [n]
    int64, which must differ, of ``cache`` [N, R, D]."""
    assert cache.is_contiguous() and values.is_contiguous()
    if values.numel():
        grid, shape = tiles(cache, len(block_ids))
        has_scales = scales is not None
        factors = scales if has_scales else values
        scatter_kernel[grid](
            values, factors, block_ids, cache, cache.shape[1], HAS_SCALES=has_scales, **shape
        )


def tiles(cache: Tensor, num_blocks: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid over ``num_blocks`` blocks of ``cache`` [N, R, D], and the sizes that ``tile`` wants."""
    _, num_rows, head_dim = cache.shape
    dim_block = power_of_two(head_dim)
    rows = max(1, min(TILE // dim_block, power_of_two(num_rows)))
    return (num_blocks, triton.cdiv(num_rows, rows)), {
        "HEAD_DIM": head_dim, "DIM_BLOCK": dim_block, "ROWS": rows,
    }  # fmt: skip
