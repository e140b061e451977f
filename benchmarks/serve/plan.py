"""From the command line to the runs it asks for."""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from benchmarks.serve.arrivals import ClosedLoop, Load, OpenLoop, TraceLoop
from benchmarks.serve.traces import Recorded
from benchmarks.serve.workload import Lengths, Planned, Shape, planned, replayed

DEFAULT_REQUESTS = 100


class Plan(NamedTuple):
    """One run."""

    load: Load
    times: list[float]  # when requests are due; empty for a closed loop
    requests: Iterator[Planned]
    num_requests: int | None  # None: as many as there is time for


def shape_of(arguments: argparse.Namespace) -> Shape:
    return Shape(
        arguments.content,
        Lengths(arguments.prompt_tokens, arguments.prompt_spread),
        Lengths(arguments.output_tokens, arguments.output_spread),
        arguments.prefix_tokens,
        arguments.prefixes,
        arguments.max_token_id,
    )


def plans(arguments: argparse.Namespace, trace: Sequence[Recorded]) -> list[Plan]:
    """Each with a seed of its own: prompts of one run are not in caches when the next one begins."""
    shape = shape_of(arguments)
    if trace:
        return [
            _replay(arguments, shape, trace, speed, arguments.seed + number)
            for number, speed in enumerate(arguments.trace_speed)
        ]
    loads: list[Load] = [ClosedLoop(count) for count in arguments.concurrency or ()]
    loads += [OpenLoop(rate, arguments.arrivals) for rate in arguments.rate or ()]
    return [_drawn(arguments, shape, load, arguments.seed + number) for number, load in enumerate(loads)]


def _drawn(arguments: argparse.Namespace, shape: Shape, load: Load, seed: int) -> Plan:
    bounded_by_time = arguments.duration_s < math.inf and arguments.arrivals != "burst"
    num_requests = arguments.num_requests or (None if bounded_by_time else DEFAULT_REQUESTS)
    requests = islice(planned(shape, seed), num_requests)
    if not isinstance(load, OpenLoop):
        return Plan(load, [], requests, num_requests)
    in_time = takewhile(lambda at: at < arguments.duration_s, load.times(seed))
    times = list(islice(in_time, num_requests))
    return Plan(load, times, requests, len(times))


def _replay(
    arguments: argparse.Namespace, shape: Shape, trace: Sequence[Recorded], speed: float, seed: int
) -> Plan:
    """Of the trace as much as there is time for."""
    part = [recorded for recorded in trace if recorded.at_s / speed < arguments.duration_s]
    part = part[: arguments.num_requests]
    times = [recorded.at_s / speed for recorded in part]
    load = TraceLoop(len(part) / (times[-1] or 1.0), speed)
    return Plan(load, times, replayed(shape, part, arguments.trace_divisor, seed), len(part))
