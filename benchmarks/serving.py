"""Baton and other systems on the same cores, the same model and prompts of the same lengths, over HTTP.

One system runs at a time. Each serves prompts alone, new ones every time, then 8 and 32 requests at once.
``baton`` is one process on all cores in bfloat16, ``baton-pair`` a prefill and a decode worker on a core
each; ``baton-chunked`` is ``baton`` in steps of 128 tokens at most, so that prompts disturb streams less;
``-auto`` are the same with the weights that Baton takes by default. ``vllm-nixl`` is vLLM in two
halves as it comes, ``vllm-nixl-tuned`` as it should be on two cores.

    python -m benchmarks.serving --systems baton baton-auto vllm-cpu --json FILE
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from benchmarks.peers import llama_cpp, vllm_cpu, vllm_nixl
from benchmarks.serve.client import Target
from benchmarks.serve.figures import Figures, Targets, figures
from benchmarks.serve.generator import closed_loop, warm_up
from benchmarks.serve.workload import Lengths, Planned, Shape, planned
from benchmarks.server import Server, serving

PROMPT_TOKENS = (128, 512, 2048)
AT_ONCE = (8, 32)
AT_ONCE_PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64
TIME_LIMIT_S = 600.0
BFLOAT16 = ("--dtype=bfloat16", "--quantization=none")
PAIR = ("--prefill=1", "--decode=1", "--disaggregate=always")

Start = Callable[[], AbstractContextManager[Server]]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Row:
    """Of one system; medians, in milliseconds."""

    system: str
    ttft_ms: dict[int, float]  # by tokens in the prompt
    tpot_ms: dict[int, float]
    tokens_per_s: dict[int, float]  # by requests at once
    itl_p99_ms: dict[int, float]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--systems", nargs="+", default=["baton", "baton-auto", "vllm-cpu"])
    parser.add_argument("--llama-server", type=Path, help="adds llama-cpp-q4_1, -q8_0 and -bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    starts = chosen(parser, options.systems, systems(options.llama_server))
    rows = list(in_turn(starts, lambda name, server: measure(name, server, options.rounds)))
    print(table(rows))
    if options.json:
        found = {"rows": [asdict(row) for row in rows], "ratios": ratios(rows)}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if len(rows) == len(options.systems) else 1


def chosen(parser: argparse.ArgumentParser, names: list[str], starts: dict[str, Start]) -> dict[str, Start]:
    """Those of these names; an unknown one ends the program."""
    if unknown := [name for name in names if name not in starts]:
        parser.error(f"unknown system {unknown[0]}; there are {', '.join(starts)}")
    return {name: starts[name] for name in names}


def in_turn(
    starts: dict[str, Start], measure: Callable[[str, Server], Coroutine[None, None, Found]]
) -> Iterator[Found]:
    """What is measured of each system. One that fails is told and left out: the others' figures are kept."""
    for name, start in starts.items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        try:
            with start() as server:
                yield asyncio.run(measure(name, server))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)


def systems(llama_server: Path | None) -> dict[str, Start]:
    starts: dict[str, Start] = {
        "baton": partial(serving, "--colocated", *BFLOAT16),
        "baton-auto": partial(serving, "--colocated"),
        "baton-chunked": partial(serving, "--colocated", "--max-num-batched-tokens=128", *BFLOAT16),
        "baton-pair": partial(serving, *PAIR, *BFLOAT16),
        "baton-pair-auto": partial(serving, *PAIR),
        "vllm-cpu": vllm_cpu.serving,
        "vllm-nixl": partial(vllm_nixl.serving, False),
        "vllm-nixl-tuned": partial(vllm_nixl.serving, True),
    }
    if llama_server is not None:
        for weights in llama_cpp.TYPES:
            starts[f"llama-cpp-{weights.lower()}"] = partial(llama_cpp.serving, llama_server, weights)
    return starts


def target_of(name: str, server: Server) -> Target:
    return Target(
        server.url,
        vllm_cpu.MODEL_NAME if name.startswith("vllm") else "default",
        fields={"ignore_eos": True},
        keep_alive=not name.startswith("llama-cpp"),
    )


async def measure(name: str, server: Server, rounds: int) -> Row:
    target = target_of(name, server)
    if error := await warm_up(target, prompts(512, seed=1), 2):
        raise RuntimeError(f"{name}: {error}")
    alone = {count: await load(target, count, 1, rounds) for count in PROMPT_TOKENS}
    crowd = {at_once: await load(target, AT_ONCE_PROMPT_TOKENS, at_once, 2 * at_once) for at_once in AT_ONCE}
    return Row(
        name,
        {count: 1e3 * found.ttft_s["p50"] for count, found in alone.items()},
        {count: 1e3 * found.tpot_s["p50"] for count, found in alone.items()},
        {at_once: found.output_tokens_per_s for at_once, found in crowd.items()},
        {at_once: 1e3 * found.itl_s["p99"] for at_once, found in crowd.items()},
    )


async def load(target: Target, num_tokens: int, at_once: int, num_requests: int) -> Figures:
    requests = islice(prompts(num_tokens, seed=num_tokens + at_once), num_requests)
    run = await closed_loop(target, requests, at_once, TIME_LIMIT_S, lambda _: None)
    found = figures(run, Targets())
    if found.num_failed:
        raise RuntimeError(f"{found.num_failed} of {found.num_sent} requests failed: {found.errors}")
    return found


def prompts(num_tokens: int, seed: int) -> Iterator[Planned]:
    return planned(Shape("ids", Lengths(num_tokens), Lengths(OUTPUT_TOKENS)), seed)


def ratios(rows: list[Row]) -> dict[str, float]:
    """Of each of our systems to each other one: below 1 is sooner, for tokens above 1 is more."""
    ours = [row for row in rows if row.system.startswith("baton")]
    found: dict[str, float] = {}
    for row in ours:
        for other in rows:
            if other in ours:
                continue
            end = f"{row.system}_vs_{other.system}".replace("-", "_")
            found |= {f"ttft_{n}_{end}": row.ttft_ms[n] / other.ttft_ms[n] for n in PROMPT_TOKENS}
            found |= {f"tpot_{n}_{end}": row.tpot_ms[n] / other.tpot_ms[n] for n in PROMPT_TOKENS}
            found |= {f"tokens_{n}_{end}": row.tokens_per_s[n] / other.tokens_per_s[n] for n in AT_ONCE}
            found |= {f"itl_p99_{n}_{end}": row.itl_p99_ms[n] / other.itl_p99_ms[n] for n in AT_ONCE}
    return found


def table(rows: list[Row]) -> str:
    lines = [
        "| system | TTFT 128 / 512 / 2,048 | TPOT after these | 8 at once | 32 at once; ITL p99 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ttft = " / ".join(f"{row.ttft_ms[n]:.0f}" for n in PROMPT_TOKENS)
        tpot = " / ".join(f"{row.tpot_ms[n]:.1f}" for n in PROMPT_TOKENS)
        crowd = f"{row.tokens_per_s[32]:.0f}; {row.itl_p99_ms[32]:.0f}"
        lines.append(f"| {row.system} | {ttft} | {tpot} | {row.tokens_per_s[8]:.0f} | {crowd} |")
    lines += ["", *(f"{name}: {value:.2f}" for name, value in ratios(rows).items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
