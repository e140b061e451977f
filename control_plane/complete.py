"""``baton complete``: one request to a running server, its tokens shown as they come."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

PROGRAM = "baton complete"
_CONNECT_TIMEOUT_S = 5.0


class ServerError(Exception):
    """What the server said instead of an answer, or that there is no server."""


def main(argv: Sequence[str]) -> int:
    arguments = command_line().parse_args(argv)
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    try:
        for piece in stream(arguments, text):
            print(piece, end="", flush=True)
        print(flush=True)
    except ServerError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has seen enough
        return 0
    except KeyboardInterrupt:
        return 130
    return 0


def command_line() -> argparse.ArgumentParser:
    environment = os.environ
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Send a prompt to a running server.")
    parser.add_argument("text", help="the prompt; - reads it from standard input")
    url = environment.get("BATON_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url, help="the server (default: %(default)s, or BATON_URL)")
    parser.add_argument("--model", default="default", help="name of the model (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=None, help="0: always the most likely token")
    parser.add_argument(
        "--chat", action="store_true", help="the text is a message to the model, not a beginning"
    )
    key = environment.get("BATON_API_KEY", "").split(",")[0]
    parser.add_argument("--api-key", default=key, help="key that the server asks for (or BATON_API_KEY)")
    return parser


def stream(arguments: argparse.Namespace, text: str) -> Iterator[str]:
    """The answer piece by piece."""
    url = arguments.url.rstrip("/")
    path = "/v1/chat/completions" if arguments.chat else "/v1/completions"
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)  # the server ends what takes too long
    try:
        with httpx.stream(
            "POST", url + path, json=body(arguments, text), headers=headers, timeout=timeout
        ) as reply:
            if reply.status_code != 200:
                reply.read()
                raise ServerError(_error_text(reply))
            yield from pieces(reply.iter_lines())
    except httpx.ConnectError as error:
        raise ServerError(f"no server at {url} ({error}); start one with: baton serve") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{url}: {error or type(error).__name__}") from error


def body(arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": arguments.model, "max_tokens": arguments.max_tokens, "stream": True}
    if arguments.temperature is not None:
        fields["temperature"] = arguments.temperature
    prompt = {"messages": [{"role": "user", "content": text}]} if arguments.chat else {"prompt": text}
    return fields | prompt


def pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text in a stream of server-sent events. ServerError for an error event or a stream cut short."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", []):
            yield choice.get("text") or choice.get("delta", {}).get("content") or ""
    raise ServerError("the answer broke off")


def _error_text(reply: httpx.Response) -> str:
    try:
        return f"{reply.json()['error']['message']} (HTTP {reply.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {reply.status_code} {reply.reason_phrase}"
