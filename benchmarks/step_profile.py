"""Where the time of a decode step goes, and how far it is from reading what it must read.

One engine, no other process: sequences are adopted, their keys and values all zero, and decode. Every figure
is the median over the steps, in ms. ``model`` is the layers, ``logits`` the last matrix, ``other`` what none
of the named parts is; ``messages`` is what a worker adds: making and encoding what its proxy is told.
``floor`` is the time to read all weights, and the keys and values of all contexts, as fast as the cores can.

    python -m benchmarks.step_profile [--threads 2] [--quantization none] [--json step.json]
"""

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import common.engine
from common.config import EngineConfig, TransferConfig, WorkerConfig
from common.engine import Engine
from common.messages import Outputs, Sampling, encode
from common.model import Model
from common.outputs import tokens_of
from common.sequence import Sequence, SequenceKey, StepOutput
from common.startup import Setup, build_engine
from kernels import LinearWeight, native
from kernels.memory import in_large_pages
from kernels.native import library

SHAPES = ((1, 64), (1, 512), (1, 2048), (4, 256), (8, 256), (16, 256), (32, 256), (32, 512))
PARTS = ("plan", "batch", "model", "logits", "sample", "record", "other", "messages")
NUM_WARM_UP = 5
PROBE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Row:
    num_sequences: int
    context_len: int
    parts_ms: dict[str, float]
    step_ms: float  # without messages
    floor_ms: float


class Clock:
    """Seconds by part, for one step at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **named)
            self.seconds[part] += time.perf_counter() - started
            return result

        return wrapper

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken


@contextmanager
def instrumented(engine: Engine, clock: Clock) -> Iterator[None]:
    model, scheduler = engine._language_model, engine._scheduler
    places = [
        (scheduler, "plan", "plan"),
        (scheduler, "record", "record"),
        (model, "forward", "model"),
        (model, "logits", "logits"),
        (common.engine, "build", "batch"),
        (common.engine, "sample", "sample"),
    ]
    with ExitStack() as stack:
        for owner, name, part in places:
            stack.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        yield


def make_engine(options: argparse.Namespace, num_blocks: int) -> Engine:
    config = EngineConfig(
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        num_blocks=num_blocks,
        max_num_seqs=max(count for count, _ in SHAPES),
    )
    setup = Setup("decode", "profile", "0", config, TransferConfig(), WorkerConfig(), options.threads)
    return build_engine(setup)


def measure(engine: Engine, shape: tuple[int, int], options: argparse.Namespace, rate: float) -> Row:
    num_sequences, context_len = shape
    num_steps = NUM_WARM_UP + options.steps
    for index in range(num_sequences):
        adopt(engine, index, context_len - num_steps // 2, options)
    clock = Clock()
    steps = []
    with instrumented(engine, clock):
        for _ in range(num_steps):
            started = time.perf_counter()
            outputs = engine.step()
            total = time.perf_counter() - started
            parts = clock.take()
            parts["other"] = total - sum(parts.values())
            started = time.perf_counter()
            tell(outputs)
            parts["messages"] = time.perf_counter() - started
            steps.append((total, parts))
    end(engine)
    counted = steps[NUM_WARM_UP:]
    parts_ms = {part: 1e3 * median(parts.get(part, 0.0) for _, parts in counted) for part in PARTS}
    floor_s = (weight_bytes(engine) + num_sequences * context_len * bytes_per_token(engine)) / rate
    return Row(num_sequences, context_len, parts_ms, 1e3 * median(t for t, _ in counted), 1e3 * floor_s)


def adopt(engine: Engine, index: int, num_tokens: int, options: argparse.Namespace) -> None:
    sampling = Sampling(max_tokens=1000, temperature=options.temperature, seed=index, ignore_eos=True)
    token_ids = torch.randint(0, 1000, (num_tokens,)).tolist()
    sequence = Sequence(SequenceKey(f"s{index}", 0), token_ids, num_tokens, sampling, math.inf)
    engine._roster.hash(sequence)
    reservation = engine.reserve(num_tokens, tuple(sequence.block_hashes))
    assert reservation is not None, "the cache is large enough for all"
    token_ids.append(1)
    engine.adopt(reservation, sequence)


def tell(outputs: list[StepOutput]) -> bytes:
    return encode(Outputs(tuple(map(tokens_of, outputs))))


def end(engine: Engine) -> None:
    for index in range(max(count for count, _ in SHAPES)):
        engine.abort(SequenceKey(f"s{index}", 0))
    engine.step()


def weight_bytes(engine: Engine) -> int:
    """Of all matrices, which every step reads."""
    model = engine._language_model
    assert isinstance(model, Model)
    matrices: list[LinearWeight] = [model.lm_head]
    for layer in model.layers:
        matrices += [layer.qkv, layer.o, layer.gate_up, layer.down]
    return sum(tensor.nbytes for matrix in matrices for tensor in matrix.data)


def bytes_per_token(engine: Engine) -> float:
    return engine.cache.block_bytes / engine.layout.block_size


def read_rate(num_threads: int) -> float:
    """Bytes per second that as many threads read from memory together, at best."""
    memory = in_large_pages(num_threads * PROBE_BYTES)
    region = torch.frombuffer(memory, dtype=torch.float32).view(num_threads, -1).fill_(1)
    best = math.inf
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(10):
            started = time.perf_counter()
            list(threads.map(lambda row: library.load().baton_probe_read(row.data_ptr(), row.nbytes), region))
            best = min(best, time.perf_counter() - started)
    return region.nbytes / best


def table(rows: list[Row]) -> str:
    names = " | ".join(PARTS)
    lines = [
        f"| sequences | context | step | {names} | outside kernels | floor | step / floor |",
        "|--:" * (len(PARTS) + 6) + "|",
    ]
    for row in rows:
        parts = " | ".join(f"{row.parts_ms[part]:.2f}" for part in PARTS)
        kernels = row.parts_ms["model"] + row.parts_ms["logits"]
        total = row.step_ms + row.parts_ms["messages"]
        lines.append(
            f"| {row.num_sequences} | {row.context_len} | {row.step_ms:.2f} | {parts} "
            f"| {100 * (1 - kernels / total):.1f} % | {row.floor_ms:.2f} | {row.step_ms / row.floor_ms:.2f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_profile", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    num_blocks = max(count * (context + options.steps + 32) for count, context in SHAPES) // 16
    engine = make_engine(options, num_blocks)
    engine.cache.data.fill_(0)  # memory of its own for every block, where there were common zeros
    rate = read_rate(options.threads)
    rows = [measure(engine, shape, options, rate) for shape in SHAPES]
    print(f"{native.instruction_set()}, {engine.layout.weights}, {options.threads} threads")
    print(f"{weight_bytes(engine) / 1e6:.0f} MB of weights, {rate / 1e9:.1f} GB/s\n{table(rows)}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"read_rate": rate, "rows": [asdict(row) for row in rows]}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
