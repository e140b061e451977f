"""Streams that wait, and readers that do not read."""

import asyncio
import json
import socket

import pytest

from common.config import ProxyConfig
from common.messages import Generate, WorkerError
from proxy.served_model import ServedModel
from tests.proxy.conftest import system_of
from tests.proxy.replies import chunks_of, streamed_text
from tests.proxy.scripted import WAIT_S, ScriptedWorker

BODY = {"prompt": "say", "max_tokens": 20, "stream": True}
OFTEN = ProxyConfig(stream_keep_alive_s=0.05)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_stream_that_waits_gets_comments(model: ServedModel, path: str) -> None:
    go_on = asyncio.Event()

    async def waits(worker: ScriptedWorker, generate: Generate) -> None:
        await go_on.wait()
        worker.say(generate, 0, tuple(b"first "))
        await go_on.wait()
        worker.say(generate, 6, tuple(b"last!"), "length")

    async with system_of(model, OFTEN) as system:
        await system.worker("decode", waits)
        body = BODY | ({"input": "say", "prompt": None} if path == "/v1/responses" else {})
        async with system.client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200
            lines = reply.aiter_lines()
            for _ in range(2):  # before the first token
                assert await anext(lines) == ": waiting"
                assert await anext(lines) == ""
            go_on.set()
            rest = [line async for line in lines]
        assert "first " in "".join(rest)
        assert "last!" in "".join(rest)


async def test_a_failure_after_a_comment_is_an_event(model: ServedModel) -> None:
    fail = asyncio.Event()

    async def fails(worker: ScriptedWorker, generate: Generate) -> None:
        await fail.wait()
        worker.fail(generate, WorkerError("invalid", "not this one"))

    async with system_of(model, OFTEN) as system:
        await system.worker("decode", fails)
        async with system.client.stream("POST", "/v1/completions", json=BODY) as reply:
            lines = reply.aiter_lines()
            assert await anext(lines) == ": waiting"
            fail.set()
            events = [line for line in [line async for line in lines] if line.startswith("data: ")]
        (event,) = events
        assert json.loads(event.removeprefix("data: "))["error"]["message"] == "not this one"


async def test_a_reader_that_does_not_read_holds_up_nobody_else_and_is_let_go(model: ServedModel) -> None:
    size, n = 3000, 8

    async def says_much(worker: ScriptedWorker, generate: Generate) -> None:
        for start in range(0, generate.sampling.max_tokens, 50):
            is_last = start + 50 == generate.sampling.max_tokens
            worker.say(generate, start, tuple(b"x" * 50), "length" if is_last else None)
            await asyncio.sleep(0)

    async with system_of(model, ProxyConfig()) as system:
        worker = await system.worker("decode", says_much)
        host, port = system.client.base_url.host, system.client.base_url.port
        body = json.dumps(BODY | {"max_tokens": size, "n": n, "logprobs": 20}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.connect((host, port))
            idle.sendall(head + body)
            async with asyncio.timeout(WAIT_S):
                await worker.until(lambda: worker.num_said >= n * size // 50)
                chunks = await chunks_of(system, "/v1/completions", prompt="say", max_tokens=50)
            assert streamed_text(chunks) == "x" * 50
            assert system.frontend.admission.num_admitted == n  # it still waits for its reader
        await system.settled()
