"""One request and what became of it, as the client saw it."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from benchmarks.serve.workload import Planned, Prompt

Endpoint = Literal["completions", "chat"]
CONNECT_TIMEOUT_S = 10.0
LINE_LIMIT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests, and what every one of them says besides its prompt."""

    url: str  # up to and without /v1
    model: str
    endpoint: Endpoint = "completions"
    api_key: str = ""
    fields: dict[str, Any] = field(default_factory=dict)  # of the body
    timeout_s: float = 600.0
    keep_alive: bool = True  # False for servers that close connections after a stream without saying so

    @property
    def full_url(self) -> str:
        path = "chat/completions" if self.endpoint == "chat" else "completions"
        return f"{self.url.rstrip('/')}/v1/{path}"

    def body(self, planned: Planned) -> bytes:
        body = {
            "model": self.model,
            "max_tokens": planned.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body | self._prompt(planned.prompt) | self.fields).encode()

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        return (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.endpoint == "chat"
            else {"prompt": prompt}
        )


@dataclass(slots=True)
class Outcome:
    """Times are ``time.perf_counter()``. ``error`` is empty when the whole answer came."""

    due_at: float
    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)  # of chunks that brought tokens
    ended_at: float = 0.0
    num_prompt_tokens: int = 0  # as the server counts
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""


def open_session(max_connections: int) -> aiohttp.ClientSession:
    """Keeps connections alive; as many at a time as there are requests under way."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=max_connections),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        read_bufsize=LINE_LIMIT_BYTES,
    )


async def send(session: aiohttp.ClientSession, target: Target, body: bytes, outcome: Outcome) -> None:
    """Fills in ``outcome``; failures of any kind are written there."""
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    if not target.keep_alive:
        headers["Connection"] = "close"
    outcome.sent_at = time.perf_counter()
    try:
        async with asyncio.timeout(target.timeout_s):
            async with session.post(target.full_url, data=body, headers=headers) as reply:
                if reply.status == 200:
                    await _read(reply, outcome)
                else:
                    outcome.error = f"HTTP {reply.status}: {_refusal(await reply.read())}"[:200]
    except TimeoutError:
        outcome.error = "time is up"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:200]
    outcome.ended_at = time.perf_counter()


async def _read(reply: aiohttp.ClientResponse, outcome: Outcome) -> None:
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        now, data = time.perf_counter(), line[5:].strip()
        if data == b"[DONE]":
            outcome.num_output_tokens = outcome.num_output_tokens or len(outcome.token_times)
            if not outcome.token_times:
                outcome.error = "an answer without tokens"
            return
        event = json.loads(data)
        if "error" in event:
            outcome.error = f"in the stream: {_text(event['error'])}"[:200]
            return
        choices = event.get("choices") or ()
        if any(map(_brings_tokens, choices)) or (not outcome.token_times and any(map(_is_last, choices))):
            outcome.token_times.append(now)
        _note_usage(event.get("usage") or {}, outcome)
    outcome.error = "the stream broke off"


def _brings_tokens(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or choice.get("token_ids")
    )


def _is_last(choice: dict[str, Any]) -> bool:
    """An answer whose tokens are no text, as special tokens are, has come when it ends."""
    return bool(choice.get("finish_reason"))


def _note_usage(usage: dict[str, Any], outcome: Outcome) -> None:
    outcome.num_prompt_tokens = usage.get("prompt_tokens") or outcome.num_prompt_tokens
    outcome.num_output_tokens = usage.get("completion_tokens") or outcome.num_output_tokens
    details = usage.get("prompt_tokens_details") or {}
    outcome.num_cached_tokens = details.get("cached_tokens") or outcome.num_cached_tokens


def _refusal(body: bytes) -> str:
    """The message in the body of an error."""
    try:
        return _text(json.loads(body).get("error", "no message"))
    except (ValueError, AttributeError):
        return body[:200].decode(errors="replace")


def _text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
