"""The same load on this machine's cores used in several ways: separate prefill and decode workers, one worker
that does both halves on all cores, one such worker on each core.

    python -m benchmarks.serve.modes DIRECTORY [--only 1P1D] -- --rate 1,2,4 --slo-ttft-s 0.5

What stands after ``--`` goes to `baton bench serve`. Each way leaves a file in DIRECTORY, from which
`baton bench report` makes a page and pictures.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serve import command
from benchmarks.server import serving

MODES = {
    "1P1D": ("--prefill", "1", "--decode", "1", "--disaggregate", "always"),
    "1P1D-auto": ("--prefill", "1", "--decode", "1"),
    "colocated-all-cores": ("--colocated",),
    "colocated-each-core": ("--colocated", "--decode", "2"),
}


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    own, load = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.modes", description=__doc__.splitlines()[0]
    )
    parser.add_argument("directory", type=Path, help="where figures go; made if need be")
    parser.add_argument("--only", choices=MODES, action="append", help="one of the ways; may be repeated")
    arguments = parser.parse_args(own)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or MODES:
        file = arguments.directory / f"{name}.json"
        with serving(*MODES[name]) as server:
            code = command.main(["--url", server.url, "--label", name, "--json", str(file), *load])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
