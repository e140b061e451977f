"""Routing with real workers on this machine.

    python -m benchmarks.routing_serving replay TRACE     policies, with 2 prefill and 2 decode workers
    python -m benchmarks.routing_serving modes            --disaggregate auto, always and never, with 1 and 1

``replay`` takes whole conversations from a trace in Mooncake's format, as many turns as are asked for: the
first minutes of the trace repeat little. Every policy gets servers of its own, one after the other, and the
same requests at the same times.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serve import command, traces
from benchmarks.serve.figures import Figures
from benchmarks.serve.options import parse
from benchmarks.server import Server, serving

MIN_TURNS = 4


class Workload(NamedTuple):
    name: str
    prompt_tokens: int
    spread: float
    rate: float  # requests a second


WORKLOADS = (
    Workload("short", 32, 0.5, 4.0),
    Workload("long", 1024, 0.5, 0.8),
    Workload("mixed", 400, 0.95, 1.5),
)


def conversations(path: Path, num_turns: int, span_s: float) -> list[dict[str, Any]]:
    """Lines of a trace: whole conversations, of ``MIN_TURNS`` turns at least, within ``span_s``."""
    chains: dict[int, list[traces.Recorded]] = defaultdict(list)
    for one in traces.read(path):
        if len(one.block_ids) > 1:  # the first block is what all have in common
            chains[one.block_ids[1]].append(one)
    chosen: list[traces.Recorded] = []
    for chain in chains.values():
        if len(chain) >= MIN_TURNS and len(chosen) + len(chain) <= num_turns:
            chosen += chain
    chosen.sort(key=lambda one: one.at_s)
    first, last = chosen[0].at_s, chosen[-1].at_s
    return [
        {
            "timestamp": 1000 * span_s * (one.at_s - first) / (last - first),
            "input_length": one.num_prompt_tokens,
            "output_length": one.num_output_tokens,
            "hash_ids": one.block_ids,
        }
        for one in chosen
    ]


def best_hit_rate(lines: Sequence[dict[str, Any]]) -> float:
    """Of one cache without end."""
    known: set[int] = set()
    num_hits = num_tokens = 0
    for line in lines:
        for block_id in line["hash_ids"]:
            if block_id not in known:
                break
            num_hits += min(traces.MOONCAKE_BLOCK_TOKENS, line["input_length"])
        known.update(line["hash_ids"])
        num_tokens += line["input_length"]
    return num_hits / num_tokens


def load(server: Server, *options: str) -> Figures:
    arguments = parse(["--url", server.url, "--seed", "5", *options])
    (point,) = asyncio.run(command.measure(arguments)).points
    return point.figures


def replay(options: argparse.Namespace) -> str:
    lines = conversations(options.trace, options.turns, options.span_s)
    rows: dict[str, Figures] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        file.flush()
        for policy in options.policies:
            chosen = ("--router-policy", policy, "--disaggregate", "always", "--prefill=2", "--decode=2")
            with serving(*chosen, *options.option) as server:
                rows[policy] = load(server, "--trace", file.name, "--trace-divisor", str(options.divisor))
    return replay_table(rows, best_hit_rate(lines), len(lines))


def replay_table(rows: dict[str, Figures], best: float, num_turns: int) -> str:
    head = [
        f"{num_turns} turns, an infinite cache would find {best:.3f}",
        "",
        "| policy | hit rate | of the best | TTFT mean s | p50 | p99 | mean / the first's | failed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    base = next(iter(rows.values())).ttft_s["mean"]
    return "\n".join(
        head
        + [
            f"| {policy} | {row.cached_share:.3f} | {row.cached_share / best:.2f} | {row.ttft_s['mean']:.2f} "
            f"| {row.ttft_s['p50']:.2f} | {row.ttft_s['p99']:.2f} | {row.ttft_s['mean'] / base:.2f} "
            f"| {row.num_failed} |"
            for policy, row in rows.items()
        ]
    )


def modes(options: argparse.Namespace) -> str:
    found: dict[tuple[str, str], Figures] = {}
    targets = ("--slo-ttft-s", str(options.slo_ttft_s), "--slo-tpot-s", str(options.slo_itl_s))
    for mode in options.modes:
        with serving(
            "--disaggregate", mode, "--slo-itl-s", str(options.slo_itl_s), *options.option
        ) as server:
            for workload in WORKLOADS:
                found[mode, workload.name] = load(
                    server, "--prompt-tokens", str(workload.prompt_tokens), "--prompt-spread",
                    str(workload.spread), "--output-tokens", "24", "--rate", str(workload.rate),
                    "--duration-s", str(options.seconds), "--warmup", "3", *targets,
                )  # fmt: skip
    lines = [
        "| workload | disaggregate | goodput, requests/s | within targets | TTFT mean s | TPOT mean s |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for workload in WORKLOADS:
        for mode in options.modes:
            figures = found[mode, workload.name]
            lines.append(
                f"| {workload.name} | {mode} | {figures.goodput_per_s:.2f} | {figures.attainment:.0%} "
                f"| {figures.ttft_s['mean']:.3f} | {figures.tpot_s['mean']:.3f} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--option", action="append", default=[], help="passed to baton serve")
    commands = parser.add_subparsers(dest="command", required=True)
    replayed = commands.add_parser("replay")
    replayed.add_argument("trace", type=Path)
    replayed.add_argument("--turns", type=int, default=120)
    replayed.add_argument("--divisor", type=int, default=16)
    replayed.add_argument("--span-s", type=float, default=60.0)
    replayed.add_argument("--policies", nargs="+", default=["round_robin", "prefix_aware", "cost"])
    compared = commands.add_parser("modes")
    compared.add_argument("--seconds", type=float, default=15.0, help="for each workload")
    compared.add_argument("--slo-ttft-s", type=float, default=1.0)
    compared.add_argument("--slo-itl-s", type=float, default=0.1)
    compared.add_argument("--modes", nargs="+", default=["auto", "always", "never"])
    options = parser.parse_args(argv)
    print(replay(options) if options.command == "replay" else modes(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
