"""Several proxies behind one port."""

import asyncio
import math
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import ConfigError, ProxyConfig
from common.messages import Generate
from proxy.siblings import merged
from tests.proxy.scripted import WAIT_S, ScriptedWorker, running
from tests.proxy.test_process import START_S, default_model, free_port, start, until_alive

ONE = """\
# HELP baton_requests_total HTTP requests by how they ended
# TYPE baton_requests_total counter
baton_requests_total{outcome="success"} 3.0
# HELP baton_ttft_seconds Arrival to first token
# TYPE baton_ttft_seconds histogram
baton_ttft_seconds_bucket{le="+Inf"} 3.0
baton_ttft_seconds_count 3.0
baton_ttft_seconds_sum 0.5
# HELP baton_num_blocks Blocks of the pool
# TYPE baton_num_blocks gauge
baton_num_blocks{role="decode",worker="decode-0"} 64.0
"""

Samples = dict[tuple[str, str, str], float]  # by metric, proxy and worker


def samples(text: str) -> Samples:
    return {
        (sample.name, sample.labels.get("proxy", ""), sample.labels.get("worker", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_figures_of_several_proxies_are_told_apart_and_those_of_workers_once() -> None:
    found = samples(merged([ONE, None, ONE.replace("3.0", "5.0")], own=2))
    assert found == {
        ("baton_proxy_up", "0", ""): 1,
        ("baton_proxy_up", "1", ""): 0,
        ("baton_proxy_up", "2", ""): 1,
        ("baton_requests_total", "0", ""): 3,
        ("baton_requests_total", "2", ""): 5,
        ("baton_ttft_seconds_count", "0", ""): 3,
        ("baton_ttft_seconds_count", "2", ""): 5,
        ("baton_ttft_seconds_sum", "0", ""): 0.5,
        ("baton_ttft_seconds_sum", "2", ""): 0.5,
        ("baton_num_blocks", "", "decode-0"): 64,
    }


def test_siblings_must_include_the_process_itself() -> None:
    with pytest.raises(ConfigError, match="--sibling-ports must name --own-port, 9001, too"):
        ProxyConfig(own_port=9001, sibling_ports=(9002, 9003))


class Proxy(NamedTuple):
    process: Process
    control: str
    client: httpx.AsyncClient  # of its own port

    async def requests(self) -> float:
        told = samples((await self.client.get("/metrics")).text)
        return told.get(("baton_requests_total", "", ""), 0.0)


class Pair(NamedTuple):
    proxies: list[Proxy]
    shared: str  # URL of the port that both listen on


@asynccontextmanager
async def two_proxies() -> AsyncIterator[Pair]:
    port, own, control = free_port(), [free_port(), free_port()], [free_port(), free_port()]
    siblings = ",".join(map(str, own))
    async with AsyncExitStack() as stack:
        proxies = []
        for i in range(2):
            options = ("--port", port, "--own-port", own[i], "--control-port", control[i])
            process = await start(*map(str, options), "--sibling-ports", siblings)
            stack.push_async_callback(ended, process)
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{own[i]}", timeout=START_S)
            await stack.enter_async_context(client)
            proxies.append(Proxy(process, f"tcp://127.0.0.1:{control[i]}", client))
        for proxy in proxies:
            await until_alive(proxy.process, proxy.client)
        yield Pair(proxies, f"http://127.0.0.1:{port}")


async def told_by_both(shared: str) -> str:
    """The metrics once both proxies have answered in time: on a busy machine one may not."""
    async with (
        asyncio.timeout(START_S),
        httpx.AsyncClient(base_url=shared, timeout=WAIT_S, verify=False) as client,
    ):
        while True:
            text = (await client.get("/metrics")).text
            if samples(text)["baton_proxy_up", "0", ""] == samples(text)["baton_proxy_up", "1", ""] == 1:
                return text


async def ended(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def test_the_end_of_one_proxy_is_felt_by_its_own_requests_alone() -> None:
    """One worker serves two proxies; both have a request on it when one is killed."""
    go_on = asyncio.Event()

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, (28120,))
        await go_on.wait()
        worker.say(generate, 1, (905,), "length")

    async with two_proxies() as (proxies, shared):
        workers = [
            ScriptedWorker(proxy.control, "decode", script, model=default_model()) for proxy in proxies
        ]
        async with running(workers[0]), running(workers[1]):
            for worker in workers:
                await worker.until(lambda worker=worker: worker.is_welcome)  # type: ignore[misc]
            body = {"prompt": "hi", "max_tokens": 2}
            asking = [
                asyncio.create_task(proxy.client.post("/v1/completions", json=body)) for proxy in proxies
            ]
            for worker in workers:
                await worker.until(lambda worker=worker: worker.num_said == 1)  # type: ignore[misc]
            proxies[0].process.kill()
            with pytest.raises(httpx.HTTPError):
                await asyncio.wait_for(asking[0], WAIT_S)
            await workers[0].until(lambda: workers[0].num_lost == 1)
            go_on.set()
            reply = await asyncio.wait_for(asking[1], WAIT_S)
            assert reply.status_code == 200
            assert reply.json()["usage"]["completion_tokens"] == 2
            assert workers[1].num_lost == 0
            async with httpx.AsyncClient(base_url=shared, timeout=WAIT_S) as client:
                assert (await client.get("/ready")).status_code == 200
                told = samples((await client.get("/metrics")).text)
            assert (told["baton_proxy_up", "0", ""], told["baton_proxy_up", "1", ""]) == (0, 1)
            assert told["baton_requests_total", "1", ""] == 1
            assert not any(proxy == "0" for name, proxy, _ in told if name != "baton_proxy_up")


async def test_all_connections_to_the_shared_port_are_served_and_counted() -> None:
    async with two_proxies() as (proxies, shared):
        workers = [ScriptedWorker(proxy.control, "decode", model=default_model()) for proxy in proxies]
        async with running(workers[0]), running(workers[1]):
            for worker in workers:
                await worker.until(lambda worker=worker: worker.is_welcome)  # type: ignore[misc]
            num_asked = 16
            for _ in range(num_asked):  # a connection each
                async with httpx.AsyncClient(base_url=shared, timeout=WAIT_S, verify=False) as client:
                    reply = await client.post("/v1/completions", json={"prompt": "hi", "temperature": -1})
                    assert reply.status_code == 400
            totals = {
                sample.labels["proxy"]: sample.value
                for family in text_string_to_metric_families(await told_by_both(shared))
                for sample in family.samples
                if sample.name == "baton_requests_refused_total"
            }
            assert math.fsum(totals.values()) == num_asked
            alone = samples((await proxies[0].client.get("/metrics")).text)
            assert alone.get(("baton_requests_refused_total", "", ""), 0.0) == totals.get("0", 0.0)
