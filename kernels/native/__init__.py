"""Kernels in C for CPUs: the operations of ``kernels.Ops`` on torch tensors, without a copy.

``csrc/isa.c`` has all kernels; it is compiled for AMX, AVX-512 with and without products of bf16, AVX2 and
plain C, and which of them runs is chosen when the library is loaded. ``build.py`` compiles on first use,
``library.py`` knows the signatures, ``decoder.py`` computes a whole step in one call.

A row's result is the same bits whatever else is in the batch, however a prompt is cut into chunks, wherever
its blocks lie and with any number of threads: every sum has one order, fixed by the row alone."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels import AttentionBatch, Forward, LayerWeights, LinearWeight
from kernels.memory import regions, round_up
from kernels.native.build import BuildError
from kernels.native.decoder import Decoder
from kernels.native.library import BLOCKS, DTYPES, KINDS, Attention, Rows, Weight, choose, in_use, load
from kernels.quantization import LARGEST_WEIGHT, BlockWeight, Quantization, check_range

__all__ = [
    "BuildError",
    "add_rms_norm",
    "available",
    "draw",
    "embedding",
    "fuse",
    "instruction_set",
    "linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary",
    "set_num_threads",
    "silu_mul",
    "store_kv",
]
PANEL_OUTPUTS = 64  # outputs are padded to this: PANEL * PANEL_GROUP
LARGEST_FLOAT = 1e30  # sums of so many as a matrix has still are finite


def available() -> str | None:
    """None when these kernels can be used here, otherwise why not."""
    try:
        load()
    except (BuildError, OSError) as error:
        return str(error)
    return None


def instruction_set(name: str | None = None) -> str:
    """The instruction set in use: "amx", "avx512_bf16", "avx512", "avx2" or "portable". With a name use that
    one from now on, with "" the best here. For tests and measurements: quantized weights must be packed anew,
    and nothing may be computing."""
    return in_use(load()) if name is None else choose(load(), name)


def set_num_threads(count: int) -> int:
    """Compute with ``count`` threads, the caller's included; returns how many there are. One is the
    default."""
    return int(load().baton_set_num_threads(count))


def pack_linear(
    weight: Tensor | BlockWeight, bias: Tensor | None, kind: Quantization | None = None
) -> LinearWeight:
    num_outputs, num_inputs = weight.shape
    if isinstance(weight, BlockWeight):
        kind, source, source_type = weight.kind, weight.rows.contiguous(), BLOCKS[weight.format]
        largest = weight.largest()
    else:
        source, source_type = weight.contiguous(), DTYPES[weight.dtype]
        largest = float(weight.abs().max()) if kind is not None else 0.0
    if kind is not None:
        in_halves = kind == "int4" or instruction_set() == "amx"
        check_range(largest, kind, LARGEST_WEIGHT if in_halves else LARGEST_FLOAT)
    num_bytes = round_up(num_outputs, PANEL_OUTPUTS) * bytes_per_output(num_inputs, kind or weight.dtype)
    data = regions().take(num_bytes)
    number = KINDS[kind or weight.dtype]
    load().baton_pack(source.data_ptr(), source_type, num_outputs, num_inputs, number, data.data_ptr())
    wide_bias = None
    if bias is not None:
        wide_bias = torch.zeros(round_up(num_outputs, PANEL_OUTPUTS))
        wide_bias[:num_outputs] = bias
    place = wide_bias.data_ptr() if wide_bias is not None else None
    fields = Weight(data.data_ptr(), place, num_inputs, num_outputs, number)
    header = torch.frombuffer(bytearray(fields), dtype=torch.uint8)
    return LinearWeight((header, data), wide_bias, num_inputs, num_outputs)


def bytes_per_output(num_inputs: int, kind: Quantization | torch.dtype) -> int:
    """The library's layout, see ``csrc/baton.h``."""
    if kind == "int8":  # a scale in single precision for 192 inputs
        return round_up(num_inputs, 64) + 4 * -(-num_inputs // 192)
    if kind == "int4":  # scales and offsets in half precision, two of each for 64 inputs
        return round_up(num_inputs, 64) // 64 * (8 + 32)
    assert isinstance(kind, torch.dtype)
    return round_up(num_inputs, 32 if kind == torch.bfloat16 else 1) * kind.itemsize


def linear(x: Tensor, weight: LinearWeight, dtype: torch.dtype | None = None) -> Tensor:
    assert x.is_contiguous() and x.shape[-1] == weight.in_features
    out = x.new_empty(x.shape[0], weight.out_features, dtype=dtype)
    types = DTYPES[x.dtype], DTYPES[out.dtype]
    load().baton_linear(x.data_ptr(), types[0], len(x), weight.data[0].data_ptr(), out.data_ptr(), types[1])
    return out


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, token_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    load().baton_rms_norm(
        x.data_ptr(),
        None,
        weight.data_ptr(),
        DTYPES[x.dtype],
        eps,
        x.numel() // width,
        width,
        out.data_ptr(),
        None,
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous() and residual.is_contiguous() and x.dtype == residual.dtype == weight.dtype
    out, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    load().baton_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        DTYPES[x.dtype],
        eps,
        x.numel() // width,
        width,
        out.data_ptr(),
        total.data_ptr(),
    )
    return out, total


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, positions, cos_sin), rotate(k, positions, cos_sin)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    x = with_whole_rows(x)
    num_rows, num_heads, head_dim = x.shape
    out = x.new_empty(x.shape)
    load().baton_rotary(
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        DTYPES[x.dtype],
        positions.data_ptr(),
        cos_sin.data_ptr(),
        num_rows,
        num_heads,
        head_dim,
    )
    return out


def store_kv(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    check_cache(cache)
    k, v = with_whole_rows(k), with_whole_rows(v)
    load().baton_store_kv(
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        DTYPES[k.dtype],
        cache.data_ptr(),
        cache.stride(0),
        DTYPES[cache.dtype],
        slots.data_ptr(),
        k.shape[0],
        cache.shape[2],
        cache.shape[3],
        k.shape[2],
    )


def paged_attention(q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, window: int) -> Tensor:
    check_cache(cache)
    q = with_whole_rows(q)
    out = q.new_empty(q.shape)
    tables = batch.block_tables
    fields = Attention(
        Rows(q.data_ptr(), q.stride(0), DTYPES[q.dtype]),
        Rows(out.data_ptr(), out.stride(0), DTYPES[q.dtype]),
        cache.data_ptr(),
        cache.stride(0),
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        tables.shape[0],
        q.shape[1],
        cache.shape[2],
        q.shape[2],
        cache.shape[3],
        window,
        DTYPES[cache.dtype],
        scale,
    )
    load().baton_attention(fields)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    load().baton_silu_mul(gate_up.data_ptr(), out.data_ptr(), DTYPES[gate_up.dtype], num_rows, width)
    return out


def draw(rows: list[Tensor], choices: list[tuple[float, float, int, float, float]]) -> list[int]:
    """As ``kernels.specification.draw_each``, for rows of logits [V] float32 that may lie apart."""
    assert all(row.is_contiguous() and row.dtype == torch.float32 for row in rows)
    places = np.array([row.data_ptr() for row in rows], np.uintp)
    laws = np.array(choices, np.float64)
    token_ids = np.empty(len(rows), np.int64)
    load().baton_draw(places.ctypes.data, laws.ctypes.data, len(rows), len(rows[0]), token_ids.ctypes.data)
    found: list[int] = token_ids.tolist()
    return found


def best_each(logits: Tensor) -> tuple[list[int], list[float]]:
    """As ``kernels.specification.best_each``."""
    assert logits.is_contiguous() and logits.dtype == torch.float32
    token_ids, values = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    load().baton_best(logits.data_ptr(), *logits.shape, token_ids.ctypes.data, values.ctypes.data)
    return token_ids.tolist(), values.tolist()


def fuse(
    layers: Sequence[LayerWeights],
    embedding: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> Forward | None:
    return Decoder(layers, embedding, cos_sin, num_heads, num_kv_heads, head_dim, eps)


def with_whole_rows(x: Tensor) -> Tensor:
    """``x`` [T, heads, D], copied unless a row's heads lie side by side; rows may lie apart."""
    return x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) else x.contiguous()


def check_cache(cache: Tensor) -> None:
    assert cache[0].is_contiguous(), "only the block dimension of a cache may be strided"
