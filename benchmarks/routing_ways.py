"""One set of workers, and a proxy for each way of routing that is compared: what differs is routing alone,
and ways can take turns every few seconds, so that whatever else the machine does meets all of them alike.

A way's prompts are salted with its name: it finds in caches what it has put there itself.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

import httpx

from benchmarks.serve import generator
from benchmarks.serve.client import Target
from benchmarks.serve.figures import Figures, Targets, figures
from benchmarks.serve.generator import Due, Run
from benchmarks.serve.workload import Planned
from benchmarks.server import Server, free_port, running
from common.cores import allowed, split, thread_variables

JOIN_S = 60.0
MAX_OPEN = 1024


@dataclass(slots=True, eq=False)
class Way:
    name: str
    server: Server
    turns: list[Run] = field(default_factory=list)  # what was sent this way and is counted

    @property
    def run(self) -> Run:
        """All turns as one."""
        outcomes = [outcome for turn in self.turns for outcome in turn.outcomes]
        return Run(outcomes, wall_s=sum(turn.wall_s for turn in self.turns))

    def target(self, salt: str) -> Target:
        return Target(
            self.server.url, "default", fields={"ignore_eos": True, "cache_salt": f"{self.name} {salt}"}
        )

    def send(self, dues: Iterable[Due], salt: str = "") -> None:
        """A turn: requests at their times, until all are answered."""
        loop = generator.open_loop(self.target(salt), dues, MAX_OPEN, lambda _: None)
        self.turns.append(asyncio.run(loop))

    def saturate(self, requests: Iterator[Planned], seconds: float, num_clients: int) -> Figures:
        """As many as it answers for so many clients; not counted."""
        loop = generator.closed_loop(self.target("full"), requests, num_clients, seconds, lambda _: None)
        return figures(asyncio.run(loop), Targets())

    def warm_up(self, requests: Iterator[Planned]) -> None:
        error = asyncio.run(generator.warm_up(self.target("first"), requests, 1))
        if error:
            raise RuntimeError(f"{self.server.url}: {error}")

    def dispatched(self) -> dict[str, float]:
        """Attempts so far by the path they took."""
        text = httpx.get(f"{self.server.url}/metrics", timeout=JOIN_S, trust_env=False).text
        found = (
            line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("baton_dispatched_total{")
        )
        return {name.split('"')[1]: float(value) for name, value in found}


def order(ways: Sequence[Way], turn: int) -> Sequence[Way]:
    """Of a turn: all orders one after the other, so that nobody is always first, or always after the same."""
    orders = list(permutations(ways))
    return orders[turn % len(orders)]


class Fleet(NamedTuple):
    prefill: int
    decode: int


@contextmanager
def side_by_side(
    model: str, ways: Mapping[str, Sequence[str]], fleet: Fleet, options: Sequence[str] = ()
) -> Iterator[list[Way]]:
    """Each way by the options of its proxy; ``options`` go to every worker."""
    with ExitStack() as stack:
        found, control = [], []
        for name, own in ways.items():
            port, control_port = free_port(), free_port()
            ports = (f"--port={port}", f"--control-port={control_port}")
            command = module("proxy", f"--model={model}", *ports, *own)
            found.append(Way(name, stack.enter_context(running(command, port, "/live"))))
            control.append(f"tcp://127.0.0.1:{control_port}")
        roles = ["prefill"] * fleet.prefill + ["decode"] * fleet.decode
        shared = (f"--model={model}", f"--proxies={','.join(control)}", *options)
        for role, cores in zip(roles, split(allowed(), len(roles)), strict=True):
            port = free_port()
            own = (f"--cores={','.join(map(str, cores))}", f"--metrics-port={port}")
            environment = os.environ | thread_variables(len(cores))
            command = module(f"{role}_worker", *shared, *own)
            stack.enter_context(running(command, port, "/metrics", environment=environment))
        for way in found:
            wait_joined(way.server, fleet)
        yield found


def module(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", name, *options]


def wait_joined(server: Server, fleet: Fleet) -> None:
    """Until the proxy has all workers."""
    until = time.monotonic() + JOIN_S
    while time.monotonic() < until:
        told = httpx.get(f"{server.url}/ready", timeout=JOIN_S, trust_env=False).json()
        if told["workers"] == fleet._asdict():
            return
        time.sleep(0.1)
    raise TimeoutError(f"not all workers have joined {server.url} within {JOIN_S:g} s")
