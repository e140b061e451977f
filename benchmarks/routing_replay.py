"""Policies on whole conversations of a recorded trace, with 2 prefill and 2 decode workers.

Conversations are whole, since the first minutes of a trace repeat little. Policies take turns: each replays
its next piece of the same requests at the same distances, with what it has cached before. The rate is a share
of what the workers have prefilled at once before, as if caches saved nothing: whatever a policy finds, its
workers keep up, and times are not those of a queue that grows for as long as it is replayed.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import fsum
from pathlib import Path
from typing import NamedTuple

from benchmarks.ratio import Ratio, ratio_of_sums
from benchmarks.routing_ways import Fleet, Way, order, side_by_side
from benchmarks.serve import traces
from benchmarks.serve.figures import Figures, Targets, figures, ttft_s
from benchmarks.serve.generator import Due
from benchmarks.serve.traces import Recorded
from benchmarks.serve.workload import Lengths, Planned, Shape, planned, replayed

MIN_TURNS = 4
CLIENTS = 8
SHAPE = Shape("ids", Lengths(512), Lengths(4))
BASE = "round_robin"
LEAST_HITS, MOST_TTFT = 0.9, 0.7  # of one infinite cache's, of round robin's


def conversations(path: Path, num_turns: int) -> list[Recorded]:
    """Requests of whole conversations, of ``MIN_TURNS`` turns at least, in order of arrival. So many of them,
    begun all over the trace: taken from its start they would all be under way at once, and then none."""
    chains: dict[int, list[Recorded]] = defaultdict(list)
    for one in traces.read(path):
        if len(one.block_ids) > 1:  # the first block is what all have in common
            chains[one.block_ids[1]].append(one)
    long = [chain for chain in chains.values() if MIN_TURNS <= len(chain) <= num_turns]
    total = sum(map(len, long))
    chosen: list[Recorded] = []
    passed = 0
    for chain in long:
        passed += len(chain)
        if len(chosen) + len(chain) <= num_turns * passed / total:
            chosen += chain
    return sorted(chosen, key=lambda one: one.at_s)


def best_hit_rate(requests: Sequence[Recorded]) -> float:
    """Of one cache without end."""
    known: set[int] = set()
    num_hits = num_tokens = 0
    for one in requests:
        for block_id in one.block_ids:
            if block_id not in known:
                break
            num_hits += min(one.block_tokens, one.num_prompt_tokens)
        known.update(one.block_ids)
        num_tokens += one.num_prompt_tokens
    return num_hits / num_tokens


def fitted(requests: Sequence[Recorded], span_s: float) -> list[float]:
    """When each is due, all of them within ``span_s``."""
    first, last = requests[0].at_s, requests[-1].at_s
    return [span_s * (one.at_s - first) / (last - first) for one in requests]


def pieces(times: Sequence[float], requests: Sequence[Planned], count: int) -> Iterator[list[Due]]:
    """As many stretches of equal length in time, each from its own beginning."""
    length = times[-1] / count
    for number in range(count):
        start, end = number * length, (number + 1) * length if number < count - 1 else float("inf")
        yield [Due(at - start, one) for at, one in zip(times, requests, strict=True) if start <= at < end]


class Row(NamedTuple):
    policy: str
    figures: Figures
    hits: float  # of the best there can be
    ttft: Ratio  # to round robin's


def replay(options: argparse.Namespace) -> tuple[str, bool]:
    """The table, and whether cache and time are as good as they should be."""
    trace = conversations(options.trace, options.turns)
    requests = list(replayed(SHAPE, trace, options.divisor, seed=5))
    num_tokens = sum(one.num_prompt_tokens for one in requests)
    ways = {
        policy: (f"--router-policy={policy}", "--disaggregate=always")
        for policy in (BASE, *(policy for policy in options.policies if policy != BASE))
    }
    with side_by_side(options.model, ways, Fleet(2, 2), options.option) as started:
        for way in started:
            way.warm_up(planned(SHAPE, 1))
        speed = started[0].saturate(planned(SHAPE, 2), options.calibration_s, CLIENTS).prompt_tokens_per_s
        span_s = options.span_s or num_tokens / (options.load * speed)
        print(f"{speed:.0f} tokens/s, {span_s:.0f} s for each policy", file=sys.stderr)
        for way in started:
            way.turns.clear()
        for number, piece in enumerate(pieces(fitted(trace, span_s), requests, options.pieces)):
            for way in order(started, number):
                way.send(piece)
        rows = rows_of(started, best_hit_rate(trace))
    text = (
        f"{len(trace)} turns, {num_tokens} prompt tokens in {span_s:.0f} s for each policy; {speed:.0f} "
        f"tokens/s were prefilled at once; an infinite cache would find {best_hit_rate(trace):.3f}"
    )
    verdicts = [verdict(row) for row in rows[1:]]
    lines = [text, "", table(rows), "", *(text for text, _ in verdicts)]
    return "\n".join(lines), all(kept for _, kept in verdicts)


def rows_of(ways: Sequence[Way], best: float) -> list[Row]:
    base = ways[0]
    found = {way: figures(way.run, Targets()) for way in ways}
    return [
        Row(way.name, one, one.cached_share / best, ratio_of_sums(waits(way), waits(base)))
        for way, one in found.items()
    ]


def waits(way: Way) -> list[float]:
    """Seconds to all first tokens together, turn by turn."""
    return [fsum(ttft_s(one) for one in turn.outcomes if not one.error) for turn in way.turns]


def table(rows: Sequence[Row]) -> str:
    head = [
        "| policy | sent | hit rate | of the best | TTFT mean s | p50 | p99 | to round robin's | failed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join(
        head
        + [
            f"| {row.policy} | {row.figures.num_sent} | {row.figures.cached_share:.3f} | {row.hits:.2f} "
            f"| {row.figures.ttft_s['mean']:.2f} | {row.figures.ttft_s['p50']:.2f} "
            f"| {row.figures.ttft_s['p99']:.2f} | {row.ttft} | {row.figures.num_failed} |"
            for row in rows
        ]
    )


def verdict(row: Row) -> tuple[str, bool]:
    judged = row.ttft.at_most(MOST_TTFT)
    if row.hits < LEAST_HITS or row.figures.num_failed:
        judged = "FAIL"
    goal = f"hits {row.hits:.2f} (at least {LEAST_HITS}), TTFT {row.ttft} (at most {MOST_TTFT})"
    return f"{row.policy}: {goal}: {judged}", judged == "pass"
