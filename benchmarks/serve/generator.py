"""Sends requests when they are due. Nothing here waits for an answer before it sends the next request, except
a closed loop, which is made to."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

from benchmarks.serve.client import Outcome, Target, open_session, send
from benchmarks.serve.workload import Planned


class Due(NamedTuple):
    at_s: float  # from the beginning of the run
    planned: Planned


@dataclass(slots=True)
class Run:
    """What came of one load. ``num_lost`` requests were due and never sent: too many were under way."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_lost: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of the thread that sends


Progress = Callable[[Run], None]  # called whenever a request has ended


async def open_loop(target: Target, requests: Iterable[Due], max_open: int, progress: Progress) -> Run:
    """Send each request at its time; those beyond ``max_open`` under way are lost."""
    run, open_now = Run(), set[asyncio.Task[None]]()
    async with open_session(max_open) as session:
        with _measured(run) as began:
            async with asyncio.TaskGroup() as tasks:
                for due in requests:
                    body, due_at = target.body(due.planned), began + due.at_s
                    await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                    if len(open_now) >= max_open:
                        run.num_lost += 1
                        continue
                    task = tasks.create_task(_send(session, target, body, due_at, run, progress))
                    open_now.add(task)
                    task.add_done_callback(open_now.discard)
    return run


async def closed_loop(
    target: Target, requests: Iterator[Planned], concurrency: int, duration_s: float, progress: Progress
) -> Run:
    """Keep ``concurrency`` requests under way until there are no more or ``duration_s`` is over; what is
    under way then is finished."""
    run = Run()

    async def client(session: aiohttp.ClientSession, until: float) -> None:
        for planned in requests:
            body, now = target.body(planned), time.perf_counter()
            if now >= until:
                return
            await _send(session, target, body, now, run, progress)

    async with open_session(concurrency) as session:
        with _measured(run) as began:
            await asyncio.gather(*(client(session, began + duration_s) for _ in range(concurrency)))
    return run


async def warm_up(target: Target, requests: Iterator[Planned], count: int) -> str:
    """One after the other, uncounted; the first error, if there is any."""
    async with open_session(1) as session:
        for planned in itertools.islice(requests, count):
            outcome = Outcome(time.perf_counter())
            await send(session, target, target.body(planned), outcome)
            if outcome.error:
                return outcome.error
    return ""


async def _send(
    session: aiohttp.ClientSession, target: Target, body: bytes, due_at: float, run: Run, progress: Progress
) -> None:
    outcome = Outcome(due_at)
    run.outcomes.append(outcome)
    await send(session, target, body, outcome)
    progress(run)


@contextmanager
def _measured(run: Run) -> Iterator[float]:
    """Notes wall and CPU time; gives the moment at which it began."""
    began, cpu_s = time.perf_counter(), time.thread_time()
    yield began
    run.wall_s, run.cpu_s = time.perf_counter() - began, time.thread_time() - cpu_s
