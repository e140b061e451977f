"""The ``baton`` command: the first word chooses what to do, the rest are its options."""

import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

USAGE = """\
usage: baton COMMAND ...

  serve [MODEL]     start a proxy, prefill and decode workers on this machine
  keygen FILE       a new secret for processes on several machines, see --secret-file
  complete TEXT     send a prompt to a running server and show the answer as it comes
  bench serve       put load on a running server: latencies, goodput, attainment of targets
  bench report      compare what several `bench serve` measured, as pictures and a page
  bench transfer    measure how fast blocks move between two processes of this machine

baton COMMAND --help lists the options of a command; baton --version tells the version.
"""


EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells have it


def main() -> None:
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # before a command handles the signal itself, as while a model is fetched
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def run(argv: Sequence[str]) -> int:
    """Exit code 2: not understood."""
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "serve": _serve,
        "complete": _complete,
        "keygen": _keygen,
        "bench": _bench,
    }
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"baton {_version()}")
        return 0
    if argv[0] not in commands:
        print(f"baton: error: no command {argv[0]!r}; there are {', '.join(commands)}", file=sys.stderr)
        return 2
    return commands[argv[0]](argv[1:])


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "(not installed)"


# Each command is imported when chosen: `baton complete` need not wait for what `baton serve` loads.


def _serve(argv: Sequence[str]) -> int:
    from control_plane import serve

    return serve.main(argv)


def _complete(argv: Sequence[str]) -> int:
    from control_plane import complete

    return complete.main(argv)


def _keygen(argv: Sequence[str]) -> int:
    from control_plane import keygen

    return keygen.main(argv)


def _bench(argv: Sequence[str]) -> int:
    benches = {"serve": "serve.command", "report": "serve.report", "transfer": "transfer"}
    if not argv or argv[0] not in benches:
        print(f"baton bench: error: choose one of {', '.join(benches)}", file=sys.stderr)
        return 2
    try:
        chosen = importlib.import_module(f"benchmarks.{benches[argv[0]]}")
    except ModuleNotFoundError as error:
        print(f"baton bench {argv[0]}: error: {error}; pip install 'baton-serve[bench]'", file=sys.stderr)
        return 2
    return int(chosen.main(list(argv[1:])))
