"""``--disaggregate auto`` against ``always`` and ``never``: goodput of each on three workloads.

The modes take turns of a few seconds on the same workers, each time with the same requests at the same times.
Rates are a share of what the better of ``always`` and ``never`` has answered at once before, with as many
clients as make steps as full as they are near that rate.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from benchmarks.ratio import Ratio, ratio_of_sums
from benchmarks.routing_ways import Fleet, Way, order, side_by_side
from benchmarks.serve.arrivals import OpenLoop
from benchmarks.serve.figures import Figures, Targets, figures
from benchmarks.serve.generator import Due
from benchmarks.serve.workload import Lengths, Planned, Shape, planned

MODES = ("auto", "always", "never")
CLIENTS = 16
LEAST_OF_BETTER = 0.95
OUTPUT_TOKENS = 24


class Workload(NamedTuple):
    name: str
    prompt_tokens: int
    spread: float

    def requests(self, seed: int) -> Iterator[Planned]:
        prompt, output = Lengths(self.prompt_tokens, self.spread), Lengths(OUTPUT_TOKENS)
        return planned(Shape("ids", prompt, output), seed)


WORKLOADS = {
    workload.name: workload
    for workload in (Workload("short", 32, 0.5), Workload("long", 1024, 0.5), Workload("mixed", 400, 0.95))
}


class Row(NamedTuple):
    workload: str
    rate: float
    mode: str
    figures: Figures
    num_good: tuple[int, ...]  # requests within their targets, turn by turn
    goodput_per_s: float
    handed_over: float  # share of the requests


def modes(options: argparse.Namespace) -> tuple[str, bool]:
    """The table, and whether auto has kept up everywhere."""
    targets = Targets(options.slo_ttft_s, options.slo_itl_s)
    ways = {mode: (f"--disaggregate={mode}", f"--slo-itl-s={options.slo_itl_s}") for mode in MODES}
    workloads = [WORKLOADS[name] for name in options.workloads]
    rows: list[Row] = []
    with side_by_side(options.model, ways, Fleet(1, 1), options.option) as started:
        for way in started:
            for workload in workloads:
                way.warm_up(workload.requests(seed=1))
        for workload in workloads:
            rows += compare(workload, started, targets, options)
    verdicts = [verdict(rows, workload.name) for workload in workloads]
    return "\n".join([table(rows), "", *(text for text, _ in verdicts)]), all(kept for _, kept in verdicts)


def compare(
    workload: Workload, ways: Sequence[Way], targets: Targets, options: argparse.Namespace
) -> list[Row]:
    full = {
        way.name: way.saturate(workload.requests(seed=2), options.phase_s, CLIENTS).answered_per_s
        for way in ways
        if way.name != "auto"
    }
    print(workload.name, *(f"{mode}: {rate:.2f}/s at once" for mode, rate in full.items()), file=sys.stderr)
    rate = options.load * max(full.values())
    before = {way.name: way.dispatched() for way in ways}
    for way in ways:
        way.turns.clear()
    for number in range(options.rounds):
        times = list(takewhile(lambda at: at < options.phase_s, OpenLoop(rate).times(100 + number)))
        requests = list(islice(workload.requests(200 + number), len(times)))
        for way in order(ways, number):
            way.send(map(Due, times, requests), salt=f"{workload.name} {number}")
    seconds = options.rounds * options.phase_s
    return [row(workload.name, rate, way, before[way.name], targets, seconds) for way in ways]


def row(
    workload: str, rate: float, way: Way, before: dict[str, float], targets: Targets, seconds: float
) -> Row:
    paths = {path: count - before.get(path, 0.0) for path, count in way.dispatched().items()}
    share = paths.get("disaggregated", 0.0) / max(1.0, sum(paths.values()))
    num_good = tuple(sum(map(targets.met_by, turn.outcomes)) for turn in way.turns)
    return Row(workload, rate, way.name, figures(way.run, targets), num_good, sum(num_good) / seconds, share)


def table(rows: Sequence[Row]) -> str:
    head = (
        "| workload | requests/s | disaggregate | handed over | sent | within targets | goodput, requests/s "
        "| TTFT mean s | TPOT mean s | failed |\n|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    return "\n".join([
        head,
        *(
            f"| {row.workload} | {row.rate:.2f} | {row.mode} | {row.handed_over:.0%} | {row.figures.num_sent}"
            f" | {row.figures.attainment:.0%} | {row.goodput_per_s:.2f} | {mean(row.figures.ttft_s):.3f} "
            f"| {mean(row.figures.tpot_s):.3f} | {row.figures.num_failed} |"
            for row in rows
        ),
    ])  # fmt: skip


def mean(distribution: dict[str, float]) -> float:
    return distribution.get("mean", math.nan)


def verdict(rows: Sequence[Row], workload: str) -> tuple[str, bool]:
    found = {row.mode: row for row in rows if row.workload == workload}
    better = max((found["always"], found["never"]), key=lambda row: row.goodput_per_s)
    ratio: Ratio = ratio_of_sums(found["auto"].num_good, better.num_good)
    judged = ratio.at_least(LEAST_OF_BETTER)
    text = f"{workload}: auto has {ratio} of the goodput of {better.mode}, the better one: {judged}"
    return text, judged == "pass"
