"""What the kernels become on a GPU that need not be there: ``python -m benchmarks.gpu.compiled``.

Each is compiled down to machine code at the sizes of Llama 3 8B, and some at others, with every configuration
that there is to choose from, and not launched. Told are what a program of it takes of a processor, and so how
many of them fit one, what it spills out of its registers, and how it multiplies. A program of its own: Triton
decides once per process whether it interprets."""

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from benchmarks.gpu.models import LLAMA_8B
from kernels import AttentionBatch, LinearWeight
from kernels import triton as gpu
from kernels.quantization import Quantization
from kernels.triton import blocks, sampling

BLOCK_SIZE = 16
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS, WARPS = 64 << 10, 64  # of a processor
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # what programs may take of a processor of an A100; H100, H200
Launch = Callable[[], object]


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


class Compiled(NamedTuple):
    kernel: str
    choice: str  # of sizes, where there is one
    num_warps: int
    num_registers: int  # of a thread
    num_spilled_bytes: int
    num_shared_bytes: int
    product: str  # the instruction that multiplies matrices, if any
    seconds: float

    def per_processor(self, shared_bytes: int) -> int:
        """How many programs fit a processor at a time; 1 KiB of shared memory is the system's."""
        registers = 256 * -(-self.num_registers * 32 // 256) * self.num_warps
        by_shared = shared_bytes // (self.num_shared_bytes + 1024)
        return min(REGISTERS // registers, WARPS // self.num_warps, by_shared)


class Compiler:
    def __init__(self, capability: int) -> None:
        """From now on launches in this process compile and end there."""
        triton.runtime.driver.set_active(AbsentGpu(capability))
        self._found: list[Compiled] = []
        self._choice = ""
        run = JITFunction.run

        def compile_one(jitted: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            started = time.perf_counter()
            compiled = run(jitted, *arguments, grid=grid, warmup=True, **options)
            self._note(jitted.fn.__name__, compiled, time.perf_counter() - started)

        def compile_all(tuner: Any, *arguments: Any, **options: Any) -> None:
            for config in tuner.configs:
                self._choice = ", ".join(f"{name} {value}" for name, value in config.kwargs.items()).lower()
                tuner.fn.run(*arguments, **options, **config.all_kwargs())
            self._choice = ""

        JITFunction.run = compile_one
        Autotuner.run = compile_all

    def compile(self, launch: Launch) -> list[Compiled]:
        """What ``launch`` launches."""
        self._found.clear()
        launch()
        return list(self._found)

    def _note(self, name: str, compiled: Any, seconds: float) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = ask("cuobjdump", "--dump-resource-usage", file.name)
            code = ask("cuobjdump", "--dump-sass", file.name)
        counts = {word: int(count) for word, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        products = re.findall(r"\b([HQ]GMMA|HMMA|IMMA|DMMA)\b", code)
        metadata = compiled.metadata
        self._found.append(
            Compiled(
                name, self._choice, metadata.num_warps, counts["REG"], counts["STACK"] + counts["LOCAL"],
                metadata.shared, products[0] if products else "", seconds,
            )
        )  # fmt: skip


def ask(tool: str, *arguments: str) -> str:
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """What each is for, and what launches it. Sizes that a kernel takes as arguments may be small: they do
    not change it."""
    model = LLAMA_8B
    groups, per_group = model.num_kv_heads, model.num_heads // model.num_kv_heads
    for name, query_lens in (
        ("batch 1", [1]), ("batch 64", [1] * 64), ("prefill", [300]), ("few new tokens each", [5, 5]),
    ):  # fmt: skip
        yield name, attention(dtype, model.head_dim, groups, per_group, 0, query_lens)
    yield "heads of 80, window", attention(dtype, 80, groups, 3, 7, [1, 40])
    yield "", around_attention(dtype)
    x, weight = torch.zeros(4, model.hidden_size, dtype=dtype), torch.ones(model.hidden_size, dtype=dtype)
    yield "", lambda: gpu.rms_norm(x, weight, 1e-5)
    yield "with residual", lambda: gpu.add_rms_norm(x, x, weight, 1e-5)
    yield "", lambda: gpu.silu_mul(x)
    kinds: tuple[Quantization, ...] = ("int8", "int4")
    for kind in kinds:
        packed = gpu.pack_linear(torch.zeros(96, 512, dtype=dtype), None, kind)
        for rows in (16, 64):
            yield f"{kind}, {rows} rows", linear(torch.zeros(rows, 512, dtype=dtype), packed)
    cache, ids = torch.zeros(4, 64, 128, dtype=dtype), torch.tensor([1, 2])
    yield "", lambda: blocks.scatter_blocks(blocks.gather_blocks(cache, ids, dtype), None, ids, cache)
    for narrow in (torch.int8, torch.float8_e4m3fn):
        yield f"as {str(narrow).removeprefix('torch.')}", quantizing(cache, ids, narrow)
    logits, row, tokens = torch.zeros(2, 1000), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    yield "", lambda: sampling.draw_each(logits, torch.zeros(2, 5, dtype=torch.float64))
    yield "", lambda: sampling.penalize(logits, tokens, tokens.int(), tokens.bool(), row, row, row)


def attention(
    dtype: torch.dtype, head_dim: int, groups: int, heads_per_group: int, window: int, query_lens: list[int]
) -> Launch:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_sequences, num_tokens, context_len = len(query_lens), int(starts[-1]), 512
    batch = AttentionBatch(
        query_starts=starts,
        context_lens=torch.full((num_sequences,), context_len, dtype=torch.int32),
        block_tables=torch.zeros(num_sequences, context_len // BLOCK_SIZE, dtype=torch.int32),
        slots=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        max_query_len=max(query_lens),
        max_context_len=context_len,
    )
    cache = torch.zeros(3, 2, groups, BLOCK_SIZE, head_dim, dtype=dtype)
    q = torch.zeros(num_tokens, groups * heads_per_group, head_dim, dtype=dtype)
    return lambda: gpu.paged_attention(q, cache, batch, 0.1, window)


def around_attention(dtype: torch.dtype) -> Launch:
    model = LLAMA_8B
    q, k = (torch.zeros(4, n, model.head_dim, dtype=dtype) for n in (model.num_heads, model.num_kv_heads))
    cache = torch.zeros(3, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim, dtype=dtype)
    places, cos_sin = torch.zeros(4, dtype=torch.int64), torch.zeros(64, model.head_dim)

    def launch() -> None:
        gpu.store_kv(k, k, cache, places)
        gpu.rotary(q, k, places, cos_sin)

    return launch


def linear(x: torch.Tensor, packed: LinearWeight) -> Launch:
    return lambda: gpu.linear(x, packed)


def quantizing(cache: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> Launch:
    def launch() -> None:
        values, scales = blocks.quantize_blocks(cache, ids, dtype)
        blocks.scatter_blocks(values, scales, ids, cache)

    return launch


def row(case: str, compiled: Compiled, shared_bytes: int) -> str:
    kernel = compiled.kernel.removesuffix("_kernel").replace("_", " ")
    cells = [
        kernel, "; ".join(filter(None, (case, compiled.choice))), compiled.num_warps, compiled.num_registers,
        compiled.num_spilled_bytes, f"{compiled.num_shared_bytes / 1024:.1f}",
        compiled.per_processor(shared_bytes), compiled.product, f"{compiled.seconds:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compiled", description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU; 90: H100, H200")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options = parser.parse_args()
    compiler, shared_bytes = Compiler(options.capability), SHARED_BYTES.get(options.capability, 99 << 10)
    print("| kernel | case | warps | registers | spilled bytes | shared KiB | at a time | product | s |")
    print("|---|---|--:|--:|--:|--:|--:|---|--:|")
    for case, launch in launches(getattr(torch, options.dtype)):
        for compiled in compiler.compile(launch):
            print(row(case, compiled, shared_bytes), flush=True)


if __name__ == "__main__":
    main()
