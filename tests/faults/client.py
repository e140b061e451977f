"""Sends cases to the HTTP API and judges the replies against the oracle."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import httpx
import msgspec

from tests.faults.oracle import NEAR_TIE, Case, Reference

CONNECT_TIMEOUT_S = 30.0


class Verdict(Enum):
    EQUAL = "equal"
    ERROR = "error"  # said so: a status of 4xx or 5xx, an error event, or a connection that broke off
    WRONG = "wrong"
    HUNG = "hung"


class Reply(msgspec.Struct):
    """``status`` is 0 when no response line came. ``error`` is empty when the server reported none."""

    status: int = 0
    token_ids: list[int] = []
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    usage: dict[str, Any] = {}
    timings: dict[str, float] = {}
    num_chunks: int = 0
    hung: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error and bool(self.finish_reason)


def judge(reply: Reply, reference: Reference) -> Verdict:
    """An error may come after some tokens; these must be right all the same."""
    expected = reference.token_ids
    if reply.hung:
        return Verdict.HUNG
    if not agrees(reply.token_ids, reference):
        return Verdict.WRONG
    if reply.ok:
        complete = len(reply.token_ids) == len(expected) and reply.finish_reason == "length"
        return Verdict.EQUAL if complete else Verdict.WRONG
    return Verdict.ERROR if reply.error else Verdict.WRONG


def agrees(token_ids: list[int], reference: Reference) -> bool:
    """Whether these are the beginning of the reference, or leave it where two tokens are nearly tied."""
    for index, (ours, expected) in enumerate(zip(token_ids, reference.token_ids, strict=False)):
        if ours != expected:
            return reference.gaps[index] < NEAR_TIE
    return len(token_ids) <= len(reference.token_ids)


class Client:
    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        """A request that takes longer than ``timeout_s`` in all has hung."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.AsyncClient(
            base_url=url, limits=limits, timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        )
        self.timeout_s = timeout_s

    async def complete(self, case: Case, stream: bool = False, **extra: Any) -> Reply:
        return await self.send("/v1/completions", body_of(case, stream) | extra)

    async def send(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        """Never raises for what the server does."""
        reply = Reply()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._send(path, body, headers or {}, reply)
        except TimeoutError:
            reply.hung = True
            reply.error = f"nothing more within {self.timeout_s:g} s"
        except httpx.TransportError as error:
            reply.error = f"{type(error).__name__}: {error}"
        return reply

    async def _send(self, path: str, body: dict[str, Any], headers: dict[str, str], reply: Reply) -> None:
        if not body.get("stream"):
            response = await self.http.post(path, json=body, headers=headers)
            reply.status = response.status_code
            return take_object(reply, response.json())
        async with self.http.stream("POST", path, json=body, headers=headers) as response:
            reply.status = response.status_code
            if response.status_code != 200:
                return take_object(reply, json.loads(await response.aread()))
            async for data in events(response):
                take_object(reply, data)

    @asynccontextmanager
    async def streaming(self, case: Case, **extra: Any) -> AsyncIterator["Stream"]:
        """A stream that is read chunk by chunk; leaving the block early disconnects."""
        body = body_of(case, stream=True) | extra
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            yield Stream(response, self.timeout_s)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path, timeout=CONNECT_TIMEOUT_S)

    async def close(self) -> None:
        await self.http.aclose()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Stream:
    def __init__(self, response: httpx.Response, timeout_s: float) -> None:
        self.reply = Reply(status=response.status_code)
        self._timeout_s = timeout_s
        self._events = events(response)

    async def read(self, num_tokens: int) -> list[int]:
        """Until so many tokens have come in all, or the stream ends."""
        async with asyncio.timeout(self._timeout_s):
            while len(self.reply.token_ids) < num_tokens:
                data = await anext(self._events, None)
                if data is None:
                    break
                take_object(self.reply, data)
        return self.reply.token_ids

    async def finish(self) -> Reply:
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data in self._events:
                    take_object(self.reply, data)
        except TimeoutError:
            self.reply.hung = True
        except httpx.TransportError as error:
            self.reply.error = f"{type(error).__name__}: {error}"
        return self.reply


def body_of(case: Case, stream: bool) -> dict[str, Any]:
    return {
        "model": "default",
        "prompt": list(case.prompt),
        "max_tokens": case.max_tokens,
        "temperature": case.temperature,
        "seed": case.seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def take_object(reply: Reply, data: dict[str, Any]) -> None:
    """A whole response or a chunk of one."""
    if error := data.get("error"):
        reply.error = str(error.get("message", error))
        return
    reply.num_chunks += 1
    reply.usage = data.get("usage") or reply.usage
    for choice in data["choices"]:
        reply.token_ids = [*reply.token_ids, *(choice.get("token_ids") or ())]
        reply.timings = choice.get("timings") or reply.timings
        reply.text += choice.get("text") or ""
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
