"""How fast bytes get from one core to another by each transport, one line of JSON for each.

    python -m benchmarks.pairs 0,1 0,3 [--budget-s 60]

`baton doctor` asks this for the cores of each prefill and decode worker.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median

from benchmarks.pipes import PipeKind, kinds

PIECE_BYTES, NUM_PIECES = 1 << 20, 48
MESSAGE_BYTES, NUM_PINGS = 1 << 10, 50


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="+", metavar="FROM,TO", help="two cores")
    parser.add_argument("--budget-s", type=float, default=60.0, help="no measurement begins after that")
    arguments = parser.parse_args(argv)
    ends = time.monotonic() + arguments.budget_s
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        for pair in arguments.pairs:
            here, there = map(int, pair.split(","))
            os.sched_setaffinity(0, {here})
            for kind in kinds(directory, there):
                if kind.is_ours and time.monotonic() < ends:
                    print(json.dumps({"from": here, "to": there} | measure(kind)), flush=True)
    return 0


def measure(kind: PipeKind) -> dict[str, object]:
    try:
        pipe = kind.open()
    except (OSError, TimeoutError, RuntimeError) as error:
        return {"transport": kind.name, "error": str(error)}
    try:
        pipe.stream(PIECE_BYTES, 8)  # warms up
        flow = pipe.stream(PIECE_BYTES, NUM_PIECES)
        delays = pipe.ping(MESSAGE_BYTES, NUM_PINGS)
    finally:
        pipe.close()
    gb_per_s = PIECE_BYTES * NUM_PIECES / flow.seconds / 1e9
    return {"transport": kind.name, "gb_per_s": gb_per_s, "p50_us": 1e6 * median(delays)}


if __name__ == "__main__":
    sys.exit(main())
