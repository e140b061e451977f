"""What routing costs, and what it brings.

    python -m benchmarks.routing decision
    python -m benchmarks.routing simulate TRACE

``decision`` times one choice among 64 workers that hold a million blocks: look-up, snapshot, policy
and prediction.

``simulate`` plays a trace of real conversations (Mooncake's format) in virtual time, see
``benchmarks.routing_simulation``. Lengths are divided by ``--divisor``, and time is stretched so that without
any cache the prefill workers would be busy for ``--load`` of it.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.routing_simulation import (
    BLOCK_SIZE,
    LAYOUT,
    MODEL,
    Simulated,
    Simulation,
    Speeds,
    Turn,
    best_hit_rate,
)
from benchmarks.serve import traces
from common.messages import BlocksStored, Load, Pace, Role, Status
from proxy.fleet import Need
from proxy.registry import Registry
from proxy.router import Router

NUM_WORKERS = 64
NUM_BLOCKS = 1_000_000
PROMPT_BLOCKS = 128


class Decision(NamedTuple):
    lookup_us: float  # of a prompt's blocks in the index
    choice_us: float
    index_bytes: int


def measure_decision(policy: str, rounds: int) -> Decision:
    """Medians over prompts that are known in part to several workers."""
    before = _resident_bytes()
    registry = _filled_registry()
    index_bytes = _resident_bytes() - before
    router = Router(policy, policy)
    lookups, choices = [], []
    for number in range(rounds):
        prompt = [_name(NUM_BLOCKS // rounds * number + block) for block in range(PROMPT_BLOCKS)]
        began = time.perf_counter()
        overlap = registry.index.overlap(prompt)
        found = time.perf_counter()
        need = Need(BLOCK_SIZE * PROMPT_BLOCKS + 7, 4096, overlap=overlap, draws=(0.3, 0.7), session="s")
        snapshot = registry.snapshot()
        choice = router.choose(snapshot, need)
        assert choice is not None
        router.predict(snapshot, need, choice)
        choices.append(time.perf_counter() - found)
        lookups.append(found - began)
    return Decision(1e6 * _median(lookups), 1e6 * _median(choices), index_bytes)


def _filled_registry() -> Registry:
    """Each worker holds a stretch of the blocks and shares a part of it with the next one."""
    registry = Registry(dead_after_s=1e9)
    share = NUM_BLOCKS // NUM_WORKERS
    for number in range(NUM_WORKERS):
        registry.hear(_peer(number), _status(number))
        registry.hear_blocks(_peer(number), BlocksStored((), is_first=True))
    for number in range(NUM_WORKERS):
        first = number * share
        for end, holder in ((share, number), (share // 4, (number + 1) % NUM_WORKERS)):
            registry.index.store(f"w{holder}", map(_name, range(first, first + end)))
    return registry


def _status(number: int) -> Status:
    role: Role = "decode" if number % 2 else "prefill"
    return Status(
        incarnation=f"w{number}",
        name=f"w{number}",
        role=role,
        address="",
        pid=1,
        layout=LAYOUT,
        model=MODEL,
        load=Load(0, number % 7, number * 37 % 2000, 10_000, 10_000, 0),
        pace=Pace(3000.0 + number, 0.02),
        block_bytes=184_320,
        links={f"w{other}": 1e9 + other for other in range(1, NUM_WORKERS, 2)} if role == "prefill" else {},
        locality={"host": f"h{number // 8}", "rack": f"r{number // 32}"},
        seat=f"h{number // 8} {number % 8}",
    )


def _peer(number: int) -> bytes:
    return f"w{number}".encode()


def _name(number: int) -> bytes:
    return number.to_bytes(16)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def decision_table(rows: dict[str, Decision]) -> str:
    lines = [
        f"| policy | look-up of {PROMPT_BLOCKS} blocks, us | choice among {NUM_WORKERS}, us | together, us |",
        "|---|--:|--:|--:|",
    ]
    lines += [
        f"| {policy} | {row.lookup_us:.0f} | {row.choice_us:.0f} | {row.lookup_us + row.choice_us:.0f} |"
        for policy, row in rows.items()
    ]
    size = next(iter(rows.values())).index_bytes
    return "\n".join([*lines, "", f"index of {NUM_BLOCKS} blocks: {size / 2**20:.0f} MiB"])


def turns_of(
    recorded: Sequence[traces.Recorded], divisor: int, num_prefill: int, load: float, speeds: Speeds
) -> list[Turn]:
    """A block of the trace becomes as many of ours as its tokens divided by ``divisor`` fill."""
    num_tokens = sum(max(1, one.num_prompt_tokens // divisor) for one in recorded)
    span_s = recorded[-1].at_s or 1.0
    stretch = (num_tokens / speeds.tokens_per_s / num_prefill / load) / span_s
    return [_turn(one, divisor, stretch) for one in recorded]


def _turn(one: traces.Recorded, divisor: int, stretch: float) -> Turn:
    num_tokens = max(1, one.num_prompt_tokens // divisor)
    per_block = max(1, one.block_tokens // divisor // BLOCK_SIZE)
    hashes = [_name(block_id * per_block + part) for block_id in one.block_ids for part in range(per_block)]
    return Turn(
        one.at_s * stretch,
        tuple(hashes[: num_tokens // BLOCK_SIZE]),
        num_tokens,
        max(1, one.num_output_tokens // divisor),
    )


def simulation_table(rows: dict[str, Simulated], best: float) -> str:
    base = rows.get("round_robin")
    lines = [
        "| policy | hit rate | of an infinite cache's | TTFT mean, s | p50 | p99 | mean / round robin's |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for policy, row in rows.items():
        ratio = f"{row.mean_s / base.mean_s:.2f}" if base else "-"
        lines.append(
            f"| {policy} | {row.hit_rate:.3f} | {row.hit_rate / best:.2f} | {row.mean_s:.3f} "
            f"| {row.percentile_s(0.5):.3f} | {row.percentile_s(0.99):.3f} | {ratio} |"
        )
    return "\n".join(lines)


def run_simulations(options: argparse.Namespace) -> str:
    recorded = traces.read(options.trace)[: options.requests or None]
    speeds = Speeds(options.tokens_per_s, options.step_s)
    turns = turns_of(recorded, options.divisor, options.workers, options.load, speeds)
    rows = {
        policy: Simulation(
            Router(policy, policy, options.disaggregate), options.workers, options.blocks, speeds
        ).run(turns)
        for policy in options.policies
    }
    return simulation_table(rows, best_hit_rate(turns))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    decision = commands.add_parser("decision")
    decision.add_argument("--rounds", type=int, default=500)
    decision.add_argument("--policies", nargs="+", default=["cost", "prefix_aware", "least_loaded"])
    replay = commands.add_parser("simulate")
    replay.add_argument("trace", type=Path)
    replay.add_argument("--divisor", type=int, default=16)
    replay.add_argument("--load", type=float, default=0.8)
    replay.add_argument("--requests", type=int, default=0, help="0: all of the trace")
    replay.add_argument("--workers", type=int, default=2, help="of each role")
    replay.add_argument("--blocks", type=int, default=60_000, help="of each worker's cache")
    replay.add_argument("--tokens-per-s", type=float, default=3000.0)
    replay.add_argument("--step-s", type=float, default=0.02)
    replay.add_argument("--disaggregate", choices=("auto", "always", "never"), default="always")
    replay.add_argument("--policies", nargs="+", default=["round_robin", "prefix_aware", "cost"])
    options = parser.parse_args(argv)
    if options.command == "decision":
        print(decision_table({p: measure_decision(p, options.rounds) for p in options.policies}))
    else:
        print(run_simulations(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
