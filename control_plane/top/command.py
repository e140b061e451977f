"""Follows the snapshots of a server until told to stop; a server that goes away is waited for."""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from control_plane.top.screen import draw

PROGRAM = "baton top"
SILENCE_S = 10.0  # snapshots come every second
WIDTH = 110  # where there is no terminal
PAUSE_S = 1.0  # before a server that does not answer is asked again

Json = dict[str, Any]


class Refused(Exception):
    """The server answers, and will go on answering so."""


def main(argv: Sequence[str]) -> int:
    arguments = command_line().parse_args(argv)
    console = Console()
    try:
        if arguments.once or not console.is_terminal:
            return once(arguments, console)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for picture in pictures(arguments, console):
                live.update(picture, refresh=True)
    except KeyboardInterrupt:
        return 0
    except Refused as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    return 0


def command_line() -> argparse.ArgumentParser:
    environment = os.environ
    parser = argparse.ArgumentParser(prog=PROGRAM, description="What a server does, in a terminal.")
    url = environment.get("BATON_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url, help="the server (default: %(default)s, or BATON_URL)")
    key = environment.get("BATON_API_KEY", "").split(",")[0]
    parser.add_argument("--api-key", default=key, help="key that the server asks for (or BATON_API_KEY)")
    parser.add_argument(
        "--span", choices=("10", "60"), default="10", help="figures of the last so many seconds"
    )
    parser.add_argument("--once", action="store_true", help="show one picture and end, as without a terminal")
    return parser


def once(arguments: argparse.Namespace, console: Console) -> int:
    try:
        second = next(itertools.islice(snapshots(arguments), 1, None))  # rates are not known before
        console.width = max(console.width, WIDTH)
        console.print(draw(second, arguments.span, console.width))
    except (httpx.HTTPError, StopIteration) as error:
        raise Refused(
            f"no snapshot from {arguments.url} ({error}); start a server with: baton serve"
        ) from error
    return 0


def pictures(arguments: argparse.Namespace, console: Console) -> Iterator[RenderableType]:
    """Without end; while there is no server, what is wrong."""
    while True:
        try:
            for snapshot in snapshots(arguments):
                yield draw(snapshot, arguments.span, console.width)
            reason = "the server has ended its stream"
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        yield Text(f"{arguments.url}: {reason}; trying again", "red")
        time.sleep(PAUSE_S)  # another machine's server: there is nothing to wait for


def snapshots(arguments: argparse.Namespace) -> Iterator[Json]:
    """Until the stream ends; HTTPError when it breaks off, Refused when there is none to be had."""
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    url = f"{arguments.url.rstrip('/')}/live/events"
    try:
        with httpx.stream("GET", url, headers=headers, timeout=SILENCE_S) as reply:
            if reply.status_code == 401:
                raise Refused("the server wants a key: --api-key or BATON_API_KEY")
            if reply.status_code != 200:
                raise Refused(f"{url}: HTTP {reply.status_code}: is it a Baton server?")
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
    except (httpx.InvalidURL, ValueError) as error:
        raise Refused(f"{url}: {error}: is it a Baton server?") from error
