"""``baton serve --proxy-workers 2``: two proxies in front of one prefill and one decode worker."""

import asyncio
import json
import os
import re
import signal

import httpx
import psutil
import pytest

from tests.system.server import START_TIMEOUT_S, Server, serving

PROMPT = "The capital of France is"

pytestmark = pytest.mark.timeout(600)


async def num_running(client: httpx.AsyncClient) -> int:
    workers = (await client.get("/workers")).json()["workers"]
    return sum(worker["load"]["num_running"] + worker["load"]["num_waiting"] for worker in workers)


async def stream(lines: "asyncio.Queue[str]", client: httpx.AsyncClient, num_tokens: int) -> str:
    """Puts the lines of an answer into ``lines`` as they come; the text when it is whole."""
    told = ""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            lines.put_nowait(line)
            if line.startswith("data: {"):
                told += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return told


async def test_one_of_two_proxies_dies_and_only_its_own_requests_with_it() -> None:
    with serving("--proxy-workers", "2") as server:
        urls = re.findall(r"each by itself at (\S+), (\S+)", server.output)[0]
        expected = await asyncio.to_thread(server.complete, PROMPT, 64, ignore_eos=True)
        async with (
            httpx.AsyncClient(base_url=urls[0], timeout=START_TIMEOUT_S, trust_env=False) as doomed,
            httpx.AsyncClient(base_url=urls[1], timeout=START_TIMEOUT_S, trust_env=False) as other,
        ):
            lines: list[asyncio.Queue[str]] = [asyncio.Queue(), asyncio.Queue()]
            endless = asyncio.create_task(stream(lines[0], doomed, 2000))
            bounded = asyncio.create_task(stream(lines[1], other, 64))
            for queue in lines:
                await asyncio.wait_for(queue.get(), START_TIMEOUT_S)
            os.kill(server.pids()["proxy-0"], signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                await endless
            assert await bounded == expected
            await asyncio.to_thread(server.wait_for, "1 of its requests are aborted")
            async with asyncio.timeout(START_TIMEOUT_S):
                while await num_running(other):
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(server.wait_for, r"proxy-0 .*worker decode-0 \(.*\) is ready", 2)
            assert await asyncio.to_thread(server.complete, PROMPT, 64, ignore_eos=True) == expected
            async with asyncio.timeout(START_TIMEOUT_S):  # the new one may not answer in time yet
                told = ""
                while not re.search(r'^baton_proxy_up\{proxy="0"\} 1', told, re.MULTILINE):
                    told = (await other.get(f"{server.url}/metrics")).text
            assert len(re.findall(r"^baton_worker_up\{", told, re.MULTILINE)) == 2
        assert server.stop(signal.SIGTERM) == 0


def test_without_being_told_to_nothing_listens_to_other_machines(system: Server) -> None:
    num_ports = 0
    for pid in system.pids().values():
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                num_ports += 1
                assert connection.laddr.ip in ("127.0.0.1", "::1")
    assert num_ports >= 2  # for clients and for workers
