"""Routing with real workers on this machine.

    python -m benchmarks.routing_serving modes            --disaggregate auto, always and never, with 1 and 1
    python -m benchmarks.routing_serving replay TRACE     policies, with 2 prefill and 2 decode workers

Either takes some five minutes and ends with a table and, for each goal, pass, FAIL, or not shown, where the
error is too large to tell. The exit code is 0 where all have passed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.routing_modes import WORKLOADS, modes
from benchmarks.routing_replay import replay
from common.config import DEFAULT_MODEL


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--option", action="append", default=[], help="passed to every worker")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_modes(commands.add_parser("modes"))
    _add_replay(commands.add_parser("replay"))
    options = parser.parse_args(argv)
    text, kept = options.measure(options)
    print(text)
    return 0 if kept else 1


def _add_modes(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(measure=modes)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=6, help="turns of each mode with each workload")
    parser.add_argument("--phase-s", type=float, default=5.0, help="for each turn")
    parser.add_argument("--load", type=float, default=0.7, help="share of what is answered at once at most")
    parser.add_argument("--slo-ttft-s", type=float, default=2.5)
    parser.add_argument("--slo-itl-s", type=float, default=0.1)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(measure=replay)
    parser.add_argument("trace", type=Path, help="in Mooncake's format")
    parser.add_argument("--turns", type=int, default=280, help="at most")
    parser.add_argument("--divisor", type=float, default=16.0, help="of all lengths")
    parser.add_argument("--load", type=float, default=0.8, help="share of what is prefilled at once at most")
    parser.add_argument("--span-s", type=float, default=0.0, help="time for the replay; 0: by --load")
    parser.add_argument("--pieces", type=int, default=10, help="turns of each policy")
    parser.add_argument("--calibration-s", type=float, default=8.0)
    parser.add_argument("--policies", nargs="+", default=["round_robin", "prefix_aware", "cost"])


if __name__ == "__main__":
    sys.exit(main())
