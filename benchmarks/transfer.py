"""How fast and how soon bytes get from one process to another, by each transport that works here.

Each of the two processes runs on one core of its own. Transports take turns with raw sockets and with copying
memory in every round, so that a busy moment of the machine meets all of them, and are given as ratios to
these.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks import blocks
from benchmarks.pipes import Pipe, PipeKind, kinds
from benchmarks.transfer_report import DelayRow, FlowRow, Report, as_json, plot, table
from common import cores

PIECES = (32 << 10, 128 << 10, 512 << 10, 2 << 20, 4 << 20)
MESSAGES = (1 << 10, 64 << 10, 1 << 20)
PROMPTS = (512, 2048)
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    rounds: int
    stream_bytes: int  # per round, pipe and size of piece
    pings: int  # per round, pipe and size of message
    budget_s: float  # no further round begins after this


FULL = Extent(rounds=7, stream_bytes=64 << 20, pings=100, budget_s=75.0)
QUICK = Extent(rounds=2, stream_bytes=16 << 20, pings=30, budget_s=15.0)


@dataclass(slots=True)
class Samples:
    """What the rounds have measured; one entry per round."""

    flows: dict[tuple[str, int], list[tuple[float, float]]] = field(
        default_factory=dict
    )  # GB/s, CPU s per GiB
    delays: dict[tuple[str, int], list[list[float]]] = field(default_factory=dict)  # seconds

    def add_round(self, pipes: dict[str, Pipe], extent: Extent) -> None:
        for name, pipe in pipes.items():
            for piece_bytes in PIECES:
                count = max(4, extent.stream_bytes // piece_bytes)
                flow, size = pipe.stream(piece_bytes, count), piece_bytes * count
                figures = (size / flow.seconds / 1e9, flow.cpu_s * GIB / size)
                self.flows.setdefault((name, piece_bytes), []).append(figures)
            for message_bytes in MESSAGES:
                self.delays.setdefault((name, message_bytes), []).append(
                    pipe.ping(message_bytes, extent.pings)
                )


def run(extent: Extent = FULL, only: Sequence[str] = ()) -> Report:
    """Measure the pipes of ``kinds``, of the transports among them those named in ``only``, if any are."""
    here, there = own_cores()
    allowed = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        chosen = [
            kind for kind in kinds(directory, there) if not (kind.is_ours and only and kind.name not in only)
        ]
        os.sched_setaffinity(0, {here})
        try:
            samples, rounds = measure(chosen, extent)
            rows = block_transfer_rows(
                [kind.name for kind in chosen if kind.is_ours], directory, there, extent
            )
        finally:
            os.sched_setaffinity(0, allowed)
    bases = [kind.name for kind in chosen if not kind.is_ours]
    return Report(
        machine(here, there), rounds, bases, flow_rows(samples, bases), delay_rows(samples, bases), rows
    )


def measure(chosen: Sequence[PipeKind], extent: Extent) -> tuple[Samples, int]:
    """The samples and the number of rounds that there was time for."""
    pipes: dict[str, Pipe] = {}
    samples, rounds, started = Samples(), 0, time.monotonic()
    try:
        for kind in chosen:
            pipes[kind.name] = kind.open()
        Samples().add_round(pipes, replace(extent, stream_bytes=1 << 20, pings=10))  # warms up
        while rounds < extent.rounds and (rounds == 0 or time.monotonic() - started < extent.budget_s):
            samples.add_round(pipes, extent)
            rounds += 1
    finally:
        for pipe in pipes.values():
            pipe.close()
    return samples, rounds


def block_transfer_rows(
    names: Sequence[str], directory: str, core: int, extent: Extent
) -> list[blocks.BlockRow]:
    """Whole transfers by the protocol on top: prompts of these lengths from Offer to Landed."""
    addresses = {
        "zmq+tcp": "zmq+tcp://127.0.0.1:0",
        "zmq+ipc": f"zmq+ipc://{directory}/blocks",
        "ucx": "ucx://127.0.0.1:0",
    }
    return [
        row
        for name in names
        for row in blocks.measure(
            name, addresses[name], core, PROMPTS[: extent.rounds], 2 * extent.rounds + 1
        )
    ]


def flow_rows(samples: Samples, bases: Sequence[str]) -> list[FlowRow]:
    rows = []
    for (name, piece_bytes), rounds in samples.flows.items():
        rates = [rate for rate, _ in rounds]
        ratios = {
            base: median(
                ours / theirs[0] for ours, theirs in zip(rates, samples.flows[base, piece_bytes], strict=True)
            )
            for base in bases
        }
        rows.append(FlowRow(name, piece_bytes, median(rates), median(cpu for _, cpu in rounds), ratios))
    return rows


def delay_rows(samples: Samples, bases: Sequence[str]) -> list[DelayRow]:
    rows = []
    for (name, message_bytes), rounds in samples.delays.items():
        ratios = {
            base: median(
                median(ours) / median(theirs)
                for ours, theirs in zip(rounds, samples.delays[base, message_bytes], strict=True)
            )
            for base in bases
        }
        times = sorted(seconds * 1e6 for one in rounds for seconds in one)
        rows.append(DelayRow(name, message_bytes, median(times), times[int(0.99 * (len(times) - 1))], ratios))
    return rows


def own_cores() -> tuple[int, int]:
    """A core for each of the two processes; the same one where there is no other."""
    allowed = cores.allowed()
    return allowed[0], allowed[min(1, len(allowed) - 1)]


def machine(here: int, there: int) -> dict[str, str]:
    return {
        "processor": processor(),
        "cores": f"{here} and {there} of {os.cpu_count()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="baton bench transfer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds; the figures are rough")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="transports to measure, such as zmq+tcp,ucx"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them (needs matplotlib)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("baton bench transfer: error: --plot needs the package matplotlib", file=sys.stderr)
        return 2
    only = [name for name in arguments.only.split(",") if name]
    known = [kind.name for kind in kinds("", 0) if kind.is_ours]
    if unknown := [name for name in only if name not in known]:
        print(
            f"baton bench transfer: error: --only: {unknown[0]} is none of {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    report = run(QUICK if arguments.quick else FULL, only)
    print(table(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(report), indent=1) + "\n")
    if arguments.plot is not None:
        plot(report, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
