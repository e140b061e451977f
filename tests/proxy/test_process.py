"""The proxy as a process of its own."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from common.config import DEFAULT_MODEL
from common.messages import Generate, ModelInfo
from common.model_source import resolve
from tests.proxy.scripted import ScriptedWorker, running

ROOT = Path(__file__).parents[2]
START_S = 60.0
LESS_THAN_USUAL_S = 25.0  # a request that does not end has 30 s by default
MAX_MEMORY_BYTES = 150 << 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def start(*options: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *options, cwd=ROOT, stdout=PIPE, stderr=PIPE
    )


@asynccontextmanager
async def proxy_process(*options: str) -> AsyncIterator[tuple[Process, httpx.AsyncClient, str]]:
    port, control = free_port(), free_port()
    process = await start("--port", str(port), "--control-port", str(control), *options)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:
            await until_alive(process, client)
            yield process, client, f"tcp://127.0.0.1:{control}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_alive(process: Process, client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_S):
        while process.returncode is None:
            try:
                assert (await client.get("/live")).status_code == 200
                return
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
    raise AssertionError(f"the proxy ended with {process.returncode}")


def default_model() -> ModelInfo:
    return ModelInfo(DEFAULT_MODEL, resolve(DEFAULT_MODEL).fingerprint, 49152, 8192)


async def test_serves_with_the_default_model_and_ends_in_good_order() -> None:
    go_on = asyncio.Event()

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, (28120,))
        await go_on.wait()
        worker.say(generate, 1, (905,), "stop" if generate.sampling.max_tokens < 2 else "length")

    async with proxy_process() as (process, client, control):
        worker = ScriptedWorker(control, "decode", script, model=default_model())
        async with running(worker):
            await worker.until(lambda: worker.is_welcome)
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await worker.until(lambda: worker.num_said == 1)
            process.send_signal(signal.SIGTERM)
            await until_refused(client.base_url.port)
            go_on.set()
            reply = await asking
            assert reply.status_code == 200
            assert reply.json()["usage"]["completion_tokens"] == 2
            assert await asyncio.wait_for(process.wait(), START_S) == 0


async def until_refused(port: int | None) -> None:
    """New connections are not taken any more."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)


async def silence(worker: ScriptedWorker, generate: Generate) -> None:
    await asyncio.Event().wait()


async def test_requests_have_as_much_time_to_finish_as_the_option_says() -> None:
    async with proxy_process("--drain-timeout-s", "0") as (process, client, control):
        worker = ScriptedWorker(control, "decode", silence, model=default_model())
        async with running(worker):
            await worker.until(lambda: worker.is_welcome)
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
            await worker.until(lambda: bool(worker.generates))
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), LESS_THAN_USUAL_S) == 0
            await asyncio.wait([asking])
            asking.exception()


async def test_a_second_signal_ends_at_once() -> None:
    async with proxy_process() as (process, client, control):
        worker = ScriptedWorker(control, "decode", silence, model=default_model())
        async with running(worker):
            await worker.until(lambda: worker.is_welcome)
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
            await worker.until(lambda: bool(worker.generates))
            process.send_signal(signal.SIGTERM)
            await until_refused(client.base_url.port)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), START_S) == 0
            await asyncio.wait([asking])
            asking.exception()


async def test_uses_little_memory() -> None:
    async with proxy_process() as (process, client, _):
        await client.post("/tokenize", json={"prompt": "some words " * 1000})
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        assert found
        assert int(found[1]) << 10 < MAX_MEMORY_BYTES


async def test_a_taken_port_is_told_on_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = str(listener.getsockname()[1])
        for options in (
            ["--port", taken, "--control-port", str(free_port())],
            ["--port", str(free_port()), "--control-port", taken],
        ):
            process = await start(*options)
            _, errors = await asyncio.wait_for(process.communicate(), START_S)
            assert process.returncode == 2
            (line,) = [line for line in errors.decode().splitlines() if "error" in line]
            assert taken in line
            assert "Traceback" not in errors.decode()


async def test_a_missing_model_is_told_on_one_line() -> None:
    process = await start("--port", "0", "--control-port", "0", "--model", "/nowhere/model.gguf")
    _, errors = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    assert errors.decode().count("/nowhere/model.gguf") == 1
    assert "Traceback" not in errors.decode()


def test_imports_no_torch() -> None:
    code = "import proxy.__main__, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, timeout=START_S).returncode
        == 0
    )
