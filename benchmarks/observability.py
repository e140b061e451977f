"""What metrics and marks cost, as a share of a decode step of the default model.

One engine decodes; every other step is without a meter. Their difference is far below the noise of a machine
that does other things too, so the meter's calls are timed by themselves as well, for as many sequences as the
step had. The report that a worker makes at every heartbeat, and what the proxy does for a token, run beside
the steps, not in them: they are given as shares of a core.

    python -m benchmarks.observability [--batch 1 8 32] [--steps 200] [--json figures.json]
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from common import startup
from common.config import STEP_TOKENS, EngineConfig, TransferConfig, WorkerConfig
from common.engine import Engine
from common.messages import Sampling
from common.outputs import status_of, usage_of
from common.pace import Stopwatch
from common.scheduler import Work
from common.sequence import Sequence as Decoded
from common.sequence import SequenceKey
from common.step_meter import StepMeter
from proxy.admission import Admission
from proxy.live import Live
from proxy.metrics import Metrics
from proxy.observer import Observer
from proxy.registry import Registry

PROMPT_TOKENS = 128
NUM_CALLS = 2000
CHUNK = 100  # calls timed together
GOAL = 0.01


class Row(NamedTuple):
    num_sequences: int
    step_ms: float
    meter_us: float  # in a step
    difference_us: float  # median of steps with, less the step without beside it; mostly noise

    @property
    def share(self) -> float:
        return self.meter_us / self.step_ms / 1e3


class Beside(NamedTuple):
    """Costs outside of steps."""

    report_us: float
    token_us: float  # at the proxy

    @property
    def report_share(self) -> float:
        """Of a core, at the default heartbeat."""
        return self.report_us / 1e6 / WorkerConfig().heartbeat_interval_s


class _Silent:
    """Stands where the meter does, and does nothing."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()

    def planned(self, began_at: float) -> None:
        pass

    def computed(self, works: Sequence[Work], began_at: float, built_at: float) -> None:
        pass


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observability", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences in a step")
    parser.add_argument("--steps", type=int, default=200, help="with a meter, and as many without")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    engine = make_engine()
    rows = [measure(engine, num_sequences, options.steps) for num_sequences in options.batch]
    beside = Beside(report_us(engine), token_us())
    print(table(rows, beside))
    if options.json:
        told = {"steps": [row._asdict() | {"share": row.share} for row in rows], "beside": beside._asdict()}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)
    return 0 if all(row.share < GOAL for row in rows) else 1


def make_engine() -> Engine:
    """On one core, not started: steps are made here."""
    first_core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first_core})
    config = EngineConfig(num_blocks=2048)
    setup = startup.Setup("decode", "decode-0", "0", config, TransferConfig(), WorkerConfig(), num_threads=1)
    return startup.build_engine(setup)


def measure(engine: Engine, num_sequences: int, num_steps: int) -> Row:
    sequences = [_sequence(index, 2 * num_steps + 10) for index in range(num_sequences)]
    for sequence in sequences:
        engine.add(sequence)
    while any(sequence.num_to_compute > 1 or not sequence.num_output_tokens for sequence in sequences):
        engine.step()
    meter, silent = engine._meter, _Silent()
    with_meter: list[float] = []
    without: list[float] = []
    for index in range(num_steps):
        pair = [(meter, with_meter), (silent, without)]
        for used, durations in pair if index % 2 else reversed(pair):  # steps grow longer one by one
            engine._meter = used  # type: ignore[assignment]
            began = time.perf_counter()
            engine.step()
            durations.append(time.perf_counter() - began)
    engine._meter = meter
    cost_us = meter_us(sequences)
    for sequence in sequences:
        engine.abort(sequence.key)
    engine.step()
    difference_us = 1e6 * median(a - b for a, b in zip(with_meter, without, strict=True))
    return Row(num_sequences, 1e3 * median(without), cost_us, difference_us)


def meter_us(sequences: list[Decoded]) -> float:
    """Of both calls that a step with one token of each makes."""
    meter = StepMeter(STEP_TOKENS)
    works = [Work(sequence, sequence.num_computed, 1, True) for sequence in sequences]

    def call() -> None:
        meter.planned(time.monotonic())
        now = time.monotonic()
        meter.computed(works, now, now)

    return _us_per_call(call)


def report_us(engine: Engine) -> float:
    """A worker's report, once a heartbeat."""
    engine.start(lambda outputs: None)
    usage = usage_of(engine)
    try:
        return _us_per_call(lambda: status_of(engine, "0", "decode-0", "decode", "", False, {}, {}, usage))
    finally:
        engine.stop()


def token_us() -> float:
    """What the proxy notes of a token."""
    registry = Registry(2.0)
    observer = Observer(Metrics(registry), Live(registry, Admission(1000, 0), "model", 0.0, 0.0), 0.0, 0.0)
    return _us_per_call(lambda: observer.note_tokens(0.02, 1, time.monotonic()))


def _us_per_call(call: Callable[[], object]) -> float:
    """The median of means: a process that is interrupted in one chunk is not in the others."""
    means = []
    for _ in range(NUM_CALLS // CHUNK):
        began = time.perf_counter()
        for _ in range(CHUNK):
            call()
        means.append((time.perf_counter() - began) / CHUNK)
    return 1e6 * median(means)


def _sequence(index: int, max_tokens: int) -> Decoded:
    prompt = [(7919 * index + 31 * position) % 40000 + 100 for position in range(PROMPT_TOKENS)]
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    key = SequenceKey(f"sequence-{index}", 0)
    return Decoded(key, prompt, len(prompt), sampling, deadline=time.monotonic() + 3600)


def table(rows: list[Row], beside: Beside) -> str:
    lines = [
        "| sequences in the step | step ms | metrics and marks µs | share | with − without, µs |",
        "|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.num_sequences} | {row.step_ms:.1f} | {row.meter_us:.1f} | {100 * row.share:.3f} % "
        f"| {row.difference_us:+.0f} |"
        for row in rows
    ]
    report = f"A worker's report: {beside.report_us:.0f} µs, {100 * beside.report_share:.3f} % of a core."
    return "\n".join([*lines, "", f"{report} A token at the proxy: {beside.token_us:.1f} µs."])


if __name__ == "__main__":
    raise SystemExit(main())
