"""Whether prompts that arrive show in the stream that runs: time between its tokens alone, and while prompts
of 2,048 tokens are prefilled and handed over back to back.

One prefill and one decode worker, a core each. Proxy and client have no core of their own here: they keep to
the prefill worker's, ahead of it where that is permitted, so that what reaches the decode worker's core is
the hand-over itself, and what reaches the client is not the prefill. Each prompt also takes part in one
decode step: without a second token nothing is handed over. Phases take turns; every prompt is new.

    python -m benchmarks.isolation [--rounds 6] [--option=--transport=zmq]
"""

import argparse
import json
import os
import random
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import quantiles

import psutil

from benchmarks.server import Server, serving

VOCABULARY = 49000
PROMPT_OF_STREAM = 64
JOIN_TIMEOUT_S = 120.0


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
    gaps: dict[str, list[float]] = {"alone": [], "disturbed": []}
    prompts = {"alone": 0, "disturbed": 0}
    stream(server, 50, random.Random(0))  # warms up
    for round_number in range(options.rounds):
        gaps["alone"] += stream(server, options.tokens, random.Random(round_number))
        disturber = Disturber(server, options.prompt_tokens, round_number)
        disturber.start()
        try:
            gaps["disturbed"] += stream(server, options.tokens, random.Random(round_number))
        finally:
            prompts["disturbed"] += disturber.stop()
    return {name: phase(prompts[name], found) for name, found in gaps.items()}


def stream(server: Server, num_tokens: int, chooser: random.Random) -> list[float]:
    """Seconds between one token and the next. The first ones, of the hand-over, do not count."""
    prompt = [chooser.randrange(VOCABULARY) for _ in range(PROMPT_OF_STREAM)]
    arrivals_s = server.complete(prompt, num_tokens).arrivals_s[2:]
    return [later - earlier for earlier, later in pairwise(arrivals_s)]


class Disturber:
    """Sends prompts, the next when the one before has been handed over and answered by two tokens."""

    def __init__(self, server: Server, num_tokens: int, seed: int) -> None:
        self._server = server
        self._num_tokens = num_tokens
        self._chooser = random.Random(1000 + seed)
        self._stopped = threading.Event()
        self._first = threading.Event()
        self._num_sent = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Returns when the first prompt is through."""
        self._thread.start()
        self._first.wait(JOIN_TIMEOUT_S)

    def stop(self) -> int:
        """How many prompts went through."""
        self._stopped.set()
        self._thread.join(JOIN_TIMEOUT_S)
        return self._num_sent

    def _run(self) -> None:
        while not self._stopped.is_set():
            prompt = [self._chooser.randrange(VOCABULARY) for _ in range(self._num_tokens)]
            self._server.complete(prompt, max_tokens=2)
            self._num_sent += 1
            self._first.set()


def phase(num_prompts: int, gaps: list[float]) -> Phase:
    percentiles = [1e3 * value for value in quantiles(gaps, n=100)]
    return Phase(num_prompts, percentiles[49], percentiles[89], percentiles[98], 1e3 * max(gaps))


def table(phases: dict[str, Phase]) -> str:
    lines = ["| | prompts | p50 ms | p90 ms | p99 ms | max ms |", "|---|--:|--:|--:|--:|--:|"]
    for name, found in phases.items():
        figures = (found.p50_ms, found.p90_ms, found.p99_ms, found.max_ms)
        lines.append(f"| {name} | {found.num_prompts} | " + " | ".join(f"{x:.1f}" for x in figures) + " |")
    alone, disturbed = phases["alone"], phases["disturbed"]
    ratios = [
        getattr(disturbed, name) / getattr(alone, name) for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    ]
    return "\n".join([*lines, "| ratio | | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |"])


if __name__ == "__main__":
    raise SystemExit(main())
