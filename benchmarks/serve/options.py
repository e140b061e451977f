"""The command line of ``baton bench serve``."""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.serve.workload import FIRST_TOKEN_ID

PROGRAM = "baton bench serve"
Number = TypeVar("Number", int, float)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Put load on a server with the OpenAI API.")
    _add_server(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_results(parser)
    arguments = parser.parse_args(argv)
    if arguments.trace is None and not arguments.rate and not arguments.concurrency:
        arguments.rate = [1.0]
    if sum(map(bool, (arguments.rate, arguments.concurrency, arguments.trace))) != 1:
        parser.error("choose one of --rate, --concurrency and --trace")
    arguments.content = arguments.content or ("text" if arguments.endpoint == "chat" else "ids")
    if arguments.content == "ids" and arguments.endpoint == "chat":
        parser.error("--content ids: the chat endpoint takes text")
    if arguments.max_token_id <= FIRST_TOKEN_ID:
        parser.error(f"--max-token-id must be above {FIRST_TOKEN_ID}: what is below is never sent")
    return arguments


def _add_server(parser: argparse.ArgumentParser) -> None:
    group, environment = parser.add_argument_group("the server"), os.environ
    url = environment.get("BATON_URL", "http://127.0.0.1:8000")
    group.add_argument("--url", default=url, help="without /v1 (default: %(default)s, or BATON_URL)")
    group.add_argument("--model", default="", help="name of the model (default: the first that it lists)")
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    key = environment.get("BATON_API_KEY", "").split(",")[0]
    group.add_argument("--api-key", default=key, help="key that the server asks for (or BATON_API_KEY)")
    group.add_argument(
        "--body", type=_fields, default={"ignore_eos": True}, metavar="JSON",
        help='more fields of each request (default: {"ignore_eos": true}: answers as long as asked for)',
    )  # fmt: skip
    group.add_argument("--timeout-s", type=_positive(float), default=600.0, help="for one request")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load: one run for each of several values, separated by commas")
    group.add_argument(
        "--rate", type=_several(float), metavar="R,…", help="open loop: requests a second (default: 1)"
    )
    group.add_argument("--arrivals", choices=("poisson", "constant", "burst"), default="poisson")
    group.add_argument("--concurrency", type=_several(int), metavar="N,…", help="closed loop: clients")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay an Azure CSV or Mooncake JSONL trace"
    )
    group.add_argument(
        "--trace-speed", type=_several(float), default=[1.0], metavar="X,…", help="times as fast"
    )
    group.add_argument(
        "--trace-divisor", type=_positive(float), default=1.0, help="divides all lengths of the trace"
    )
    group.add_argument("--num-requests", type=_positive(int), default=None, help="of each run at most")
    group.add_argument(
        "--duration-s", type=_positive(float), default=math.inf, help="requests are sent for so long"
    )
    group.add_argument(
        "--max-open", type=_positive(int), default=1024, help="requests under way at most (open loop)"
    )
    group.add_argument("--warmup", type=int, default=2, help="requests before the first run, not counted")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the requests, where no trace says what they are")
    group.add_argument("--prompt-tokens", type=_positive(int), default=512, help="(default: %(default)s)")
    group.add_argument("--output-tokens", type=_positive(int), default=64, help="(default: %(default)s)")
    group.add_argument(
        "--prompt-spread", type=_share, default=0.0, help="0.5: lengths from half to one and a half"
    )
    group.add_argument("--output-spread", type=_share, default=0.0)
    group.add_argument(
        "--prefix-tokens", type=int, default=0, help="prompt tokens shared with other requests"
    )
    group.add_argument("--prefixes", type=_positive(int), default=1, help="how many different ones there are")
    group.add_argument(
        "--content", choices=("ids", "text"), default=None, help="default: ids; for chat, text"
    )
    group.add_argument("--max-token-id", type=_positive(int), default=30_000, help="random ids are below it")
    group.add_argument(
        "--seed", type=int, default=time.time_ns() % 1_000_000, help="default: another each time"
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the results")
    group.add_argument(
        "--slo-ttft-s", type=_positive(float), default=math.inf, help="target for each request"
    )
    group.add_argument("--slo-tpot-s", type=_positive(float), default=math.inf)
    group.add_argument("--slo-e2e-s", type=_positive(float), default=math.inf)
    group.add_argument(
        "--label", default="", help="name of the system in tables and pictures (default: --url)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures and every request there")
    group.add_argument("--png", type=Path, metavar="FILE", help="draw the figures (needs matplotlib)")
    group.add_argument("--html", type=Path, metavar="FILE", help="a page with tables and pictures (the same)")


def _several(kind: Callable[[str], Number]) -> Callable[[str], list[Number]]:
    def numbers(text: str) -> list[Number]:
        return [_positive(kind)(part) for part in text.split(",")]

    return numbers


def _positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def number(text: str) -> Number:
        found = kind(text)
        if not 0 < found < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return found

    return number


def _share(text: str) -> float:
    found = float(text)
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 up to 1")
    return found


def _fields(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return found
