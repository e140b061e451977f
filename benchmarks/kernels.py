"""The kernels in C against PyTorch's and against what the core could do at best, in one run on one core.

    python -m benchmarks.kernels [--core 0] [--isa avx512] [--repeats 20] [--json kernels.json]

Sizes are those of the default model. Weights are as many as the model has, so that they come from memory as
in a real step; the floor of one row is reading them once (``of floor``: measured time over that), the floor
of many rows is the rate of multiply-adds in registers. Every time is the least of the repeats, floors are
measured between them: other programs on the machine slow both."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionBatch, LayerWeights, LinearWeight, cpu, native
from kernels.memory import in_large_pages
from kernels.native import library
from kernels.quantization import Quantization

HIDDEN, WIDE, HEADS, GROUPS, HEAD_DIM, LAYERS, BLOCK = 576, 1536, 9, 3, 64, 30, 16
SHAPES = (((HEADS + 2 * GROUPS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDE, HIDDEN), (HIDDEN, WIDE))
WEIGHTS: tuple[tuple[torch.dtype, Quantization | None], ...] = (
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "int4"),
)
LINEAR_ROWS = (1, 8, 16, 32, 128, 512)
ATTENTION = ((1, 512, 1), (1, 2048, 1), (1, 256, 32), (128, 128, 1), (512, 512, 1), (512, 2048, 1))
STEPS = ((1, 1), (1, 512), (1, 2048), (128, 128), (512, 512), (2048, 2048))
PROBE_ROUNDS = 200_000


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    seconds: float
    torch_seconds: float | None
    num_bytes: int  # that must be read
    operations: int  # multiplications and additions
    floor_s: float


@dataclass(slots=True)
class Floors:
    read_bytes_per_s: float = 0.0
    float32_per_s: float = 0.0
    bf16_per_s: float = 0.0  # of units of their own, or as float32

    def of(self, num_bytes: int, operations: int, in_bf16: bool) -> float:
        """Seconds that reading and computing take at least, done at the same time."""
        rate = self.bf16_per_s if in_bf16 else self.float32_per_s
        return max(num_bytes / self.read_bytes_per_s, operations / rate)


class Bench:
    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.floors = Floors()
        self.results: list[Result] = []
        self._region = torch.frombuffer(in_large_pages(256 << 20), dtype=torch.float32).fill_(1)

    def probe(self) -> None:
        """The best of all so far."""
        lib, floors = library.load(), self.floors
        num_bytes = self._region.nbytes
        seconds = elapsed(lambda: lib.baton_probe_read(self._region.data_ptr(), num_bytes))
        floors.read_bytes_per_s = max(floors.read_bytes_per_s, num_bytes / seconds)
        start = time.perf_counter()
        operations = lib.baton_probe_floats(PROBE_ROUNDS)
        floors.float32_per_s = max(floors.float32_per_s, operations / (time.perf_counter() - start))
        start = time.perf_counter()
        operations = lib.baton_probe_bf16(PROBE_ROUNDS // 10)
        rate = operations / (time.perf_counter() - start)
        floors.bf16_per_s = max(floors.bf16_per_s, rate, floors.float32_per_s)

    def measure(
        self,
        name: str,
        ours: Callable[[], object],
        theirs: Callable[[], object] | None,
        num_bytes: int,
        operations: int,
        in_bf16: bool,
    ) -> None:
        """Ours and theirs by turns."""
        best, best_theirs = float("inf"), float("inf")
        for repeat in range(self.repeats):
            best = min(best, elapsed(ours))
            if theirs is not None:
                best_theirs = min(best_theirs, elapsed(theirs))
            if repeat % 4 == 0:
                self.probe()
        floor = self.floors.of(num_bytes, operations, in_bf16)
        result = Result(name, best, None if theirs is None else best_theirs, num_bytes, operations, floor)
        self.results.append(result)
        print(line(result), flush=True)


def elapsed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def line(result: Result) -> str:
    seconds, theirs = result.seconds, result.torch_seconds
    rates = f"{result.num_bytes / seconds / 1e9:7.1f} {result.operations / seconds / 1e9:8.0f}"
    against = "      -" if theirs is None else f"{seconds / theirs:6.2f}x"
    return f"{result.name:44} {seconds * 1e6:10.0f} {rates} {against} {seconds / result.floor_s:6.2f}x"


HEADER = f"{'':44} {'µs':>10} {'GB/s':>7} {'GFLOP/s':>8} {'/torch':>7} {'/floor':>7}"


# Linear layers: all of the model's, one after the other


def packed_layers(
    dtype: torch.dtype, quantization: Quantization | None
) -> tuple[list[list[Tensor]], list[list[LinearWeight]]]:
    plain = [[(torch.randn(shape) * shape[1] ** -0.5).to(dtype) for shape in SHAPES] for _ in range(LAYERS)]
    return plain, [[native.pack_linear(weight, None, quantization) for weight in layer] for layer in plain]


def run_packed(packed: list[list[LinearWeight]], x: dict[int, Tensor]) -> None:
    for layer in packed:
        for weight in layer:
            native.linear(x[weight.in_features], weight)


def run_plain(plain: list[list[Tensor]], x: dict[int, Tensor]) -> None:
    for layer in plain:
        for weight in layer:
            F.linear(x[weight.shape[1]], weight)


def bench_linear(bench: Bench) -> None:
    for dtype, quantization in WEIGHTS:
        plain, packed = packed_layers(dtype, quantization)
        num_bytes = sum(weight.data[1].nbytes for layer in packed for weight in layer)
        numbers = sum(weight.numel() for layer in plain for weight in layer)
        for rows in LINEAR_ROWS:
            x = {width: torch.randn(rows, width).to(dtype) for width in (HIDDEN, WIDE)}
            bench.measure(
                f"linear {quantization or short(dtype)}, {rows} rows",
                partial(run_packed, packed, x),
                partial(run_plain, plain, x),
                num_bytes,
                2 * rows * numbers,
                dtype == torch.bfloat16,
            )


# Attention: one layer


def context(
    num_queries: int, context_len: int, sequences: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Sequences at blocks in random order."""
    blocks = -(-context_len // BLOCK)
    cache = torch.randn(sequences * blocks, 2, GROUPS, BLOCK, HEAD_DIM).to(dtype)
    tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
    positions = torch.arange(context_len - num_queries, context_len).repeat(sequences)
    owners = torch.arange(sequences).repeat_interleave(num_queries)
    slots = tables.long()[owners, positions // BLOCK] * BLOCK + positions % BLOCK
    starts = torch.arange(sequences + 1).int() * num_queries
    lens = torch.full((sequences,), context_len).int()
    batch = AttentionBatch(starts, lens, tables, slots, positions, num_queries, context_len)
    return torch.randn(sequences * num_queries, HEADS, HEAD_DIM).to(dtype), cache, batch


def bench_attention(bench: Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for queries, length, sequences in ATTENTION:
            q, cache, batch = context(queries, length, sequences, dtype)
            pairs = sequences * (queries * length - queries * (queries - 1) // 2)
            bench.measure(
                f"attention {short(dtype)}, {sequences} x {queries} of {length}",
                partial(native.paged_attention, q, cache, batch, 0.125, 0),
                partial(cpu.paged_attention, q, cache, batch, 0.125, 0),
                cache.nbytes,
                4 * HEADS * HEAD_DIM * pairs,
                dtype == torch.bfloat16,
            )


# Passes over rows


def bench_rows(bench: Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 512):
            for name, call, num_bytes in row_passes(rows, dtype):
                title = f"{name} {short(dtype)}, {rows} rows"
                bench.measure(title, partial(call, native), partial(call, cpu), num_bytes, 0, False)


def row_passes(rows: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., object], int]]:
    x, residual, weight = (torch.randn(n, HIDDEN).to(dtype) for n in (rows, rows, 1))
    yield "add_rms_norm", lambda ops: ops.add_rms_norm(x, residual, weight[0], 1e-5), 2 * x.nbytes
    gate_up = torch.randn(rows, 2 * WIDE).to(dtype)
    yield "silu_mul", lambda ops: ops.silu_mul(gate_up), gate_up.nbytes
    heads, cache, batch = context(rows, rows, 1, dtype)
    angles = torch.randn(rows, HEAD_DIM)
    k = heads[:, :GROUPS]
    yield "rotary", lambda ops: ops.rotary(heads, k, batch.positions, angles), heads.nbytes + k.nbytes
    yield "store_kv", lambda ops: ops.store_kv(k, k, cache, batch.slots), 2 * k.nbytes


# Whole steps of a model with random weights


def bench_steps(bench: Bench) -> None:
    for dtype, quantization in WEIGHTS:
        _, packed = packed_layers(dtype, quantization)
        norm = torch.ones(HIDDEN, dtype=dtype)
        layers = [LayerWeights(norm, a, None, None, b, norm, c, d, 0) for a, b, c, d in packed]
        embedding, angles = torch.randn(1000, HIDDEN).to(dtype), torch.randn(max(STEPS)[1], HEAD_DIM)
        forward = native.fuse(layers, embedding, angles, HEADS, GROUPS, HEAD_DIM, 1e-5)
        assert forward is not None
        num_bytes = sum(weight.data[1].nbytes for layer in packed for weight in layer)
        numbers = LAYERS * sum(rows * columns for rows, columns in SHAPES)
        for queries, length in STEPS:
            _, cache, batch = context(queries, length, 1, dtype)
            token_ids = torch.randint(0, 1000, (queries,))
            caches = list(torch.randn(cache.shape[0], LAYERS, *cache.shape[1:]).to(dtype).unbind(1))
            pairs = queries * length - queries * (queries - 1) // 2
            bench.measure(
                f"step {quantization or short(dtype)}, {queries} of {length}",
                partial(forward, token_ids, batch, caches),
                None,
                num_bytes + LAYERS * cache.nbytes,
                2 * queries * numbers + LAYERS * 4 * HEADS * HEAD_DIM * pairs,
                dtype == torch.bfloat16,
            )


def short(dtype: torch.dtype) -> str:
    return "f32" if dtype == torch.float32 else "bf16"


GROUPS_OF_CASES: dict[str, Callable[[Bench], None]] = {
    "linear": bench_linear,
    "attention": bench_attention,
    "rows": bench_rows,
    "steps": bench_steps,
}


def report(bench: Bench, isa: str) -> dict[str, object]:
    return {
        "command": " ".join(sys.argv),
        "machine": platform.processor() or platform.machine(),
        "instruction_set": isa,
        "torch": torch.__version__,
        "floors": asdict(bench.floors),
        "results": [asdict(result) for result in bench.results],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="core to run on")
    parser.add_argument("--isa", default="", help="instruction set: amx, avx512_bf16, avx512, avx2, portable")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", choices=GROUPS_OF_CASES, action="append", help="a group of cases")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    reason = native.available()
    if reason is not None:
        print(f"the kernels in C are not to be had: {reason}", file=sys.stderr)
        return 2
    os.sched_setaffinity(0, {arguments.core})
    torch.set_num_threads(1)
    isa = native.instruction_set(arguments.isa)
    bench = Bench(arguments.repeats)
    bench.probe()
    print(f"{isa} on core {arguments.core}\n{HEADER}")
    with torch.inference_mode():
        for name, run in GROUPS_OF_CASES.items():
            if not arguments.only or name in arguments.only:
                run(bench)
    rates = (bench.floors.read_bytes_per_s, bench.floors.float32_per_s, bench.floors.bf16_per_s)
    print(
        "floors: {:.1f} GB/s read, {:.0f} GFLOP/s in float32, {:.0f} in bf16".format(
            *(r / 1e9 for r in rates)
        )
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(report(bench, isa), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
