"""The ``baton`` command: the first word chooses what to do, the rest are its options."""

import importlib
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

USAGE = """\
usage: baton COMMAND ...

  serve [MODEL]     start a proxy, prefill and decode workers on this machine
  doctor            check whether this machine can serve well, and say what to do
  top               what a running server does, in the terminal
  keygen FILE       a new secret for processes on several machines, see --secret-file
  complete TEXT     send a prompt to a running server and show the answer as it comes
  bench serve       put load on a running server: latencies, goodput, attainment of targets
  bench report      compare what several `bench serve` measured, as pictures and a page
  bench transfer    measure how fast blocks move between two processes of this machine

baton COMMAND --help lists the options of a command; baton --version tells the version.
"""
# Each is imported when chosen: `baton complete` need not wait for what `baton serve` loads.
COMMANDS = {
    "serve": "control_plane.serve",
    "doctor": "control_plane.doctor.command",
    "top": "control_plane.top.command",
    "keygen": "control_plane.keygen",
    "complete": "control_plane.complete",
}
BENCHES = {
    "serve": "benchmarks.serve.command",
    "report": "benchmarks.serve.report",
    "transfer": "benchmarks.transfer",
}
EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells have it


def main() -> None:
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # before a command handles the signal itself, as while a model is fetched
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def run(argv: Sequence[str]) -> int:
    """Exit code 2: not understood."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"baton {_version()}")
        return 0
    if argv[0] == "bench":
        return _bench(argv[1:])
    if argv[0] not in COMMANDS:
        known = ", ".join((*COMMANDS, "bench"))
        print(f"baton: error: no command {argv[0]!r}; there are {known}", file=sys.stderr)
        return 2
    return int(importlib.import_module(COMMANDS[argv[0]]).main(argv[1:]))


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "(not installed)"


def _bench(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in BENCHES:
        print(f"baton bench: error: choose one of {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    try:
        chosen = importlib.import_module(BENCHES[argv[0]])
    except ModuleNotFoundError as error:
        print(f"baton bench {argv[0]}: error: {error}; pip install 'baton-serve[bench]'", file=sys.stderr)
        return 2
    return int(chosen.main(list(argv[1:])))
