"""Whether prompts that arrive show in the stream that runs: time between its tokens alone, and while prompts
of 2,048 tokens are prefilled and handed over back to back.

One prefill and one decode worker, a core each. Proxy and client have no core of their own here: they keep to
the prefill worker's, ahead of it where that is permitted, so that what reaches the decode worker's core is
the hand-over itself, and what reaches the client is not the prefill. Each prompt also takes part in one
decode step, which reads all of its keys and values: without a second token nothing is handed over. *Apart
from these* are the gaps in which there was no such step. Phases take turns; every prompt is new.

    python -m benchmarks.isolation [--rounds 6] [--option=--transport=zmq]
"""

import argparse
import json
import os
import random
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import quantiles
from typing import NamedTuple

import psutil

from benchmarks.server import Server, serving

VOCABULARY = 49000
PROMPT_OF_STREAM = 64
JOIN_TIMEOUT_S = 120.0


class Gap(NamedTuple):
    """Between two tokens of the stream."""

    seconds: float
    ended_at: float  # time.perf_counter()


@dataclass(frozen=True, slots=True)
class Phase:
    num_prompts: int  # handed over meanwhile
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=200, help="of the stream, in each phase")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument(
        "--option", action="append", default=[], help="passed on, e.g. --option=--transport=ucx"
    )
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    with serving(*options.option) as server:
        keep_to_core(sorted(os.sched_getaffinity(0))[0])
        phases = measure(server, options)
    print(table(phases))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({name: asdict(phase) for name, phase in phases.items()}, file, indent=1)
    return 0


def keep_to_core(core: int) -> None:
    """This process and the proxy; both workers stay where they are."""
    proxies = [child.pid for child in psutil.Process().children(recursive=True) if "proxy" in child.cmdline()]
    for pid in (0, *proxies):
        os.sched_setaffinity(pid, {core})
        with suppress(PermissionError):
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))


def measure(server: Server, options: argparse.Namespace) -> dict[str, Phase]:
    alone: list[Gap] = []
    disturbed: list[Gap] = []
    apart: list[Gap] = []
    num_prompts = 0
    stream(server, 50, random.Random(0))  # warms up
    for round_number in range(options.rounds):
        alone += stream(server, options.tokens, random.Random(round_number))
        disturber = Disturber(server, options.prompt_tokens, round_number)
        disturber.start()
        try:
            gaps = stream(server, options.tokens, random.Random(round_number))
        finally:
            joined_at = disturber.stop()
        num_prompts += len(joined_at)
        during = [at for at in joined_at if gaps[0].ended_at <= at <= gaps[-1].ended_at]
        shared = {min(range(len(gaps)), key=lambda i: abs(gaps[i].ended_at - at)) for at in during}
        disturbed += gaps
        apart += [gap for number, gap in enumerate(gaps) if number not in shared]
    return {
        "alone": phase(0, alone),
        "disturbed": phase(num_prompts, disturbed),
        "apart from these": phase(num_prompts, apart),
    }


def stream(server: Server, num_tokens: int, chooser: random.Random) -> list[Gap]:
    """The first gaps, of the hand-over, do not count."""
    prompt = [chooser.randrange(VOCABULARY) for _ in range(PROMPT_OF_STREAM)]
    began = time.perf_counter()
    arrivals_s = server.complete(prompt, num_tokens).arrivals_s[2:]
    return [Gap(later - earlier, began + later) for earlier, later in pairwise(arrivals_s)]


class Disturber:
    """Sends prompts, the next when the one before has been handed over and answered by two tokens."""

    def __init__(self, server: Server, num_tokens: int, seed: int) -> None:
        self._server = server
        self._num_tokens = num_tokens
        self._chooser = random.Random(1000 + seed)
        self._stopped = threading.Event()
        self._first = threading.Event()
        self._joined_at: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Returns when the first prompt is through."""
        self._thread.start()
        self._first.wait(JOIN_TIMEOUT_S)

    def stop(self) -> list[float]:
        """When the second token of each prompt came, of the step that it took part in."""
        self._stopped.set()
        self._thread.join(JOIN_TIMEOUT_S)
        return self._joined_at

    def _run(self) -> None:
        while not self._stopped.is_set():
            prompt = [self._chooser.randrange(VOCABULARY) for _ in range(self._num_tokens)]
            began = time.perf_counter()
            self._joined_at.append(began + self._server.complete(prompt, max_tokens=2).arrivals_s[-1])
            self._first.set()


def phase(num_prompts: int, gaps: list[Gap]) -> Phase:
    percentiles = [1e3 * value for value in quantiles((gap.seconds for gap in gaps), n=100)]
    longest_s = max(gap.seconds for gap in gaps)
    return Phase(num_prompts, percentiles[49], percentiles[89], percentiles[98], 1e3 * longest_s)


def table(phases: dict[str, Phase]) -> str:
    lines = ["| | prompts | p50 ms | p90 ms | p99 ms | max ms |", "|---|--:|--:|--:|--:|--:|"]
    alone = phases["alone"]
    for name, found in phases.items():
        figures = (found.p50_ms, found.p90_ms, found.p99_ms, found.max_ms)
        lines.append(f"| {name} | {found.num_prompts} | " + " | ".join(f"{x:.1f}" for x in figures) + " |")
        if found is not alone:
            whole = (alone.p50_ms, alone.p90_ms, alone.p99_ms, alone.max_ms)
            ratios = (f"{x / y:.2f}" for x, y in zip(figures, whole, strict=True))
            lines.append(f"| {name}, ratio | | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
