"""Runs the loads that the command line asks for, and shows what came of them."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence

import httpx
import uvloop
from rich.console import Console

from benchmarks.serve import generator, report
from benchmarks.serve.arrivals import ClosedLoop
from benchmarks.serve.client import Target
from benchmarks.serve.figures import Targets, figures
from benchmarks.serve.options import PROGRAM, parse
from benchmarks.serve.plan import Plan, plans, shape_of
from benchmarks.serve.results import Point, Results, surroundings
from benchmarks.serve.terminal import progress_of, table
from benchmarks.serve.traces import TraceError, read
from benchmarks.serve.workload import planned

CONNECT_TIMEOUT_S = 5.0
TABLE_WIDTH = 140  # a line that a narrow terminal wraps is read more easily than columns cut off


class BenchError(Exception):
    """Why nothing could be measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1: nothing could be measured, or not one request was answered."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        if (arguments.png or arguments.html) and importlib.util.find_spec("matplotlib") is None:
            raise BenchError("--png and --html need the package matplotlib")
        results = uvloop.run(measure(arguments))
    except (BenchError, TraceError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    show(results)
    report.write([results], arguments.png, arguments.html)
    if arguments.json is not None:
        results.write(arguments.json)
    return 0 if any(point.figures.num_failed < point.figures.num_sent for point in results.points) else 1


def show(results: Results) -> None:
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table(results))
    for point in results.points:
        if point.figures.doubt:
            print(f"{PROGRAM}: {point.label}: {point.figures.doubt}", file=sys.stderr)
        for error, count in point.figures.errors.items():
            print(f"{PROGRAM}: {point.label}: {count} × {error}", file=sys.stderr)


async def measure(arguments: argparse.Namespace) -> Results:
    """All runs, one after the other; BenchError when the server does not answer properly."""
    trace = read(arguments.trace) if arguments.trace else []
    ahead = plans(arguments, trace)
    target = await target_of(arguments)
    warm_up = planned(shape_of(arguments), arguments.seed - 1)
    error = await generator.warm_up(target, warm_up, arguments.warmup)
    if error:
        raise BenchError(f"{target.full_url}: {error}")
    targets = Targets(arguments.slo_ttft_s, arguments.slo_tpot_s, arguments.slo_e2e_s)
    points = []
    for plan in ahead:
        found = await run(plan, target, arguments)
        points.append(Point.of(plan.load, figures(found, targets), found.outcomes))
    return Results(
        arguments.label or arguments.url, unit(arguments), targets, points, about(arguments, target)
    )


async def run(plan: Plan, target: Target, arguments: argparse.Namespace) -> generator.Run:
    with progress_of(plan.load.label, plan.num_requests) as progress:
        if isinstance(plan.load, ClosedLoop):
            return await generator.closed_loop(
                target, plan.requests, plan.load.concurrency, arguments.duration_s, progress
            )
        dues = map(generator.Due, plan.times, plan.requests)
        return await generator.open_loop(target, dues, arguments.max_open, progress)


async def target_of(arguments: argparse.Namespace) -> Target:
    url = arguments.url.rstrip("/").removesuffix("/v1")
    model = arguments.model or await first_model(url, arguments.api_key)
    return Target(url, model, arguments.endpoint, arguments.api_key, arguments.body, arguments.timeout_s)


async def first_model(url: str, api_key: str) -> str:
    """That the server lists; BenchError when there is none, or no server."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(headers=headers, timeout=CONNECT_TIMEOUT_S) as client:
            reply = (await client.get(f"{url}/v1/models")).raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except httpx.ConnectError as error:
        raise BenchError(f"no server at {url} ({error}); start one with: baton serve") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise BenchError(
            f"{url} does not say which models it has ({error}); name one with --model"
        ) from error


def unit(arguments: argparse.Namespace) -> str:
    return "clients at a time" if arguments.concurrency else "requests per second"


def about(arguments: argparse.Namespace, target: Target) -> dict[str, object]:
    """How it was measured."""
    if arguments.trace:
        requests = f"{arguments.trace.name}, lengths ÷ {arguments.trace_divisor:g}"
    else:
        requests = f"{arguments.prompt_tokens} prompt and {arguments.output_tokens} output tokens"
    what = {"requests": requests, "url": target.url, "model": target.model, "endpoint": target.endpoint}
    options = {
        name: value for name, value in vars(arguments).items() if name not in ("api_key", "url", "model")
    }
    return what | surroundings() | {"options": {name: str(value) for name, value in options.items()}}
