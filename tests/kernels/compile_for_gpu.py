"""Compiles the Triton kernels for a GPU that is not there, down to its machine code, and launches nothing.

A program of its own, because Triton decides once per process whether it interprets:
``python -m tests.kernels.compile_for_gpu 90 bfloat16`` prints a line for each kernel compiled: its name, and
the bytes of shared memory that a program of it takes."""

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernels import AttentionBatch
from kernels import triton as gpu
from kernels.quantization import Quantization
from kernels.triton import blocks, sampling

GROUPS, BLOCK_SIZE, HIDDEN, VOCAB = 8, 16, 512, 1000


class AbsentGpu:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    """From now on launches compile, with every configuration there is to choose from, and end there."""
    run = JITFunction.run

    def compile_one(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        assert compiled is not None and "cubin" in compiled.asm
        print(self.fn.__name__, compiled.metadata.shared)

    def compile_all(self: Any, *args: Any, **options: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, **options, **config.all_kwargs())

    JITFunction.run = compile_one
    Autotuner.run = compile_all


def attention_batch(query_lens: list[int], context_len: int) -> AttentionBatch:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_tokens = int(starts[-1])
    return AttentionBatch(
        query_starts=starts,
        context_lens=torch.full((len(query_lens),), context_len, dtype=torch.int32),
        block_tables=torch.zeros(len(query_lens), context_len // BLOCK_SIZE, dtype=torch.int32),
        slots=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        max_query_len=max(query_lens),
        max_context_len=context_len,
    )


def compile_attention(
    dtype: torch.dtype, head_dim: int, heads_per_group: int, window: int, steps: list[list[int]]
) -> None:
    """``steps``: new tokens of each sequence."""
    cache = torch.zeros(3, 2, GROUPS, BLOCK_SIZE, head_dim, dtype=dtype)
    for query_lens in steps:
        batch = attention_batch(query_lens, 64)
        q = torch.zeros(sum(query_lens), GROUPS * heads_per_group, head_dim, dtype=dtype)
        gpu.paged_attention(q, cache, batch, 0.1, window)
    batch = attention_batch([4], 64)
    kv = torch.zeros(4, GROUPS, head_dim, dtype=dtype)
    gpu.store_kv(kv, kv, cache, batch.slots)
    gpu.rotary(kv.repeat(1, heads_per_group, 1), kv, batch.positions, torch.zeros(64, head_dim))


def compile_rows(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(4, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    gpu.rms_norm(x, weight, 1e-5)
    gpu.add_rms_norm(x, x, weight, 1e-5)
    gpu.silu_mul(x)
    kinds: tuple[Quantization, ...] = ("int8", "int4")
    for kind in kinds:
        packed = gpu.pack_linear(torch.zeros(96, HIDDEN, dtype=dtype), None, kind)
        for num_rows in (1, 64):
            gpu.linear(torch.zeros(num_rows, HIDDEN, dtype=dtype), packed)


def compile_blocks(dtype: torch.dtype) -> None:
    cache, ids = torch.zeros(4, 64, 128, dtype=dtype), torch.tensor([1, 2])
    blocks.scatter_blocks(blocks.gather_blocks(cache, ids, torch.float32), None, ids, cache)
    for narrow in (torch.int8, torch.float8_e4m3fn):
        values, scales = blocks.quantize_blocks(cache, ids, narrow)
        blocks.scatter_blocks(values, scales, ids, cache)


def compile_sampling() -> None:
    logits, row, ids = torch.zeros(2, VOCAB), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    sampling.draw_each(logits, torch.zeros(2, 5, dtype=torch.float64))
    sampling.penalize(logits, ids, ids.int(), ids.bool(), row, row, row)


def main(capability: int, dtype: torch.dtype) -> None:
    triton.runtime.driver.set_active(AbsentGpu(capability))
    compile_only()
    compile_attention(dtype, 128, 4, 0, [[1], [1] * 64, [40], [5, 5]])
    compile_attention(dtype, 80, 3, 7, [[1, 40]])
    compile_rows(dtype)
    compile_blocks(dtype)
    compile_sampling()


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]))
