"""What handing over costs a request: one prefill and one decode worker against one process that does both.

Both systems run side by side, prefill on the same core, and take turns request by request; every prompt is
new. Figures are medians. ``exposed`` is the part of the transfer that prefill did not hide: from the first
token sampled to the sequence taken over. The first token itself never waits for it.

    python -m benchmarks.handoff
"""

import argparse
import json
import os
import random
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from benchmarks.server import Reply, Server, serving

VOCABULARY = 49000
PARTS = ("route_s", "queue_s", "prefill_s", "exposed_transfer_s", "decode_wait_s", "first_step_s")


class Row(NamedTuple):
    num_tokens: int
    pair_ttft_ms: float
    colocated_ttft_ms: float
    parts_ms: dict[str, float]  # of the pair

    @property
    def ttft_ratio(self) -> float:
        return self.pair_ttft_ms / self.colocated_ttft_ms

    @property
    def exposed_share(self) -> float:
        """Of the time to prefill."""
        return self.parts_ms["exposed_transfer_s"] / self.parts_ms["prefill_s"]


class Replies(NamedTuple):
    pair: list[Reply]
    colocated: list[Reply]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=9, help="in each order of starting the two")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument(
        "--option", action="append", default=[], help="passed to both, e.g. --option=--transport=ucx"
    )
    options = parser.parse_args(argv)
    rows = measure(options.prompt_tokens, options.rounds, options.option)
    print(table(rows))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([row._asdict() | {"ttft_ratio": row.ttft_ratio} for row in rows], file, indent=1)
    return 0


def measure(prompt_tokens: list[int], rounds: int, options: list[str]) -> list[Row]:
    """Which of two processes was started first shows in their speed, by where their memory lies: so both
    orders."""
    replies: dict[int, Replies] = {num_tokens: Replies([], []) for num_tokens in prompt_tokens}
    for pair_first in (True, False):
        with ExitStack() as stack:
            pair, colocated = start_both(stack, pair_first, options)
            for num_tokens in prompt_tokens:
                take_turns(pair, colocated, num_tokens, rounds, replies[num_tokens])
    return [row_of(num_tokens, found) for num_tokens, found in replies.items()]


def start_both(stack: ExitStack, pair_first: bool, options: list[str]) -> tuple[Server, Server]:
    first_core = sorted(os.sched_getaffinity(0))[0]
    pair = serving("--disaggregate=always", *options)
    colocated = serving(*options, "--colocated", f"--cores={first_core}")
    if pair_first:
        return stack.enter_context(pair), stack.enter_context(colocated)
    other = stack.enter_context(colocated)
    return stack.enter_context(pair), other


def take_turns(pair: Server, colocated: Server, num_tokens: int, rounds: int, replies: Replies) -> None:
    chooser = random.Random(num_tokens)
    for number in range(-1, rounds):  # the first one warms up
        for server, found in ((pair, replies.pair), (colocated, replies.colocated)):
            prompt = [chooser.randrange(VOCABULARY) for _ in range(num_tokens)]
            reply = server.complete(prompt, max_tokens=8)
            if number >= 0:
                found.append(reply)


def row_of(num_tokens: int, replies: Replies) -> Row:
    parts = {name: 1e3 * median(r.timings.get(name, 0.0) for r in replies.pair) for name in PARTS}
    return Row(
        num_tokens,
        1e3 * median(reply.ttft_s for reply in replies.pair),
        1e3 * median(reply.ttft_s for reply in replies.colocated),
        parts,
    )


def table(rows: list[Row]) -> str:
    names = [name.removesuffix("_s").replace("exposed_transfer", "exposed") for name in PARTS]
    lines = [
        "| prompt tokens | TTFT 1P1D ms | TTFT colocated ms | ratio | "
        + " | ".join(f"{name} ms" for name in names)
        + " | exposed / prefill |",
        "|--:" * (len(names) + 5) + "|",
    ]
    for row in rows:
        parts = " | ".join(f"{row.parts_ms[name]:.1f}" for name in PARTS)
        lines.append(
            f"| {row.num_tokens} | {row.pair_ttft_ms:.0f} | {row.colocated_ttft_ms:.0f} "
            f"| {row.ttft_ratio:.2f} | {parts} | {100 * row.exposed_share:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
