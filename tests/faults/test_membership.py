"""Workers and proxies come and go while requests run: by an administrator's word, and by way of etcd."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.cores import thread_variables
from common.discovery import Place
from common.etcd import Etcd
from tests.etcd import EtcdServer
from tests.faults.client import Client
from tests.faults.cluster import Cluster, Process, free_port, running
from tests.faults.conftest import ADMIN_KEY
from tests.faults.looking import runs_on
from tests.faults.oracle import Oracle
from tests.faults.support import ask_all, assert_equal, cases
from tests.faults.waiting import eventually

WAIT_S = 60.0
ADMINISTRATOR = {"Authorization": f"Bearer {ADMIN_KEY}"}


@asynccontextmanager
async def load(client: Client, oracle: Oracle, seed: int) -> AsyncIterator[None]:
    """Requests without pause while the block runs, and at least some; every one of them must be right."""
    asked = cases(12, (50, 400), 24, seed=seed)
    oracle.references(asked)
    ended = asyncio.Event()

    async def ask_on() -> None:
        while True:
            assert_equal(*await ask_all(client, oracle, asked, at_once=6))
            if ended.is_set():
                return

    asking = asyncio.create_task(ask_on())
    try:
        yield
    finally:
        ended.set()
        await asking


async def told(cluster: Cluster, method: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=WAIT_S, headers=ADMINISTRATOR) as http:
        return await http.request(method, path)


async def test_drained_workers_finish_what_they_have_and_end(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    async with load(client, oracle, seed=500):
        await runs_on(cluster, "decode")
        for name in ("p1", "d1"):
            reply = await told(cluster, "POST", f"/workers/{name}/drain")
            assert (reply.status_code, reply.json()["state"]) == (202, "draining")
        for name in ("p1", "d1"):
            assert await asyncio.to_thread(cluster[name].wait) == 0


async def test_a_removed_worker_gets_no_work_until_its_process_is_another(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    async with load(client, oracle, seed=510):
        victim = await runs_on(cluster, "decode")
        reply = await told(cluster, "DELETE", f"/workers/{victim}")
        assert (reply.status_code, reply.json()["state"]) == (200, "refused")
        assert reply.json()["attempts"] == 0
    at_rest = (await cluster.workers())[victim]
    assert (at_rest["state"], at_rest["attempts"]) == ("refused", 0)
    assert cluster[victim].alive

    async def idle() -> bool:
        reported = (await cluster.workers())[victim]["load"]
        return bool(reported["num_running"] == reported["num_receiving"] == 0)

    await eventually(idle, WAIT_S, "what it was doing is stopped there")
    cluster.restart(victim)
    await cluster.ready()


def found_by(place: str) -> Any:
    """For ``Cluster``: processes find each other there."""

    def change(_: str, argv: list[str]) -> list[str]:
        kept = [word for word in argv if not word.startswith("--proxies=")]
        return [*kept, f"--discovery={place}"]

    return change


@asynccontextmanager
async def another_proxy(cluster: Cluster, model: Path, place: str) -> AsyncIterator[tuple[Process, str, str]]:
    """Its process, not yet started, its URL and its control address."""
    port, control = free_port(), free_port()
    options = [f"--port={port}", f"--control-port={control}", f"--discovery={place}", "--disaggregate=always"]
    argv = ["-m", "proxy", f"--model={model}", *options]
    process = Process("proxy2", argv, cluster.directory / "proxy2.log", thread_variables(1))
    try:
        yield process, f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{control}"
    finally:
        process.kill()


async def serves(url: str) -> bool:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        try:
            told = (await http.get(f"{url}/ready")).json()
            return bool(told["workers"] == {"prefill": 1, "decode": 1})
        except httpx.TransportError:
            return False


@pytest.mark.timeout(300)
async def test_proxies_come_and_go_and_etcd_too_without_a_failed_request(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """Of two proxies that announce themselves in etcd, one comes while that is away and dies later without a
    word."""
    server = EtcdServer(tmp_path)
    place = f"etcd://{server.host}/test"
    keys = Etcd(Place.parse(place).endpoints)
    try:
        server.start()
        async with (
            running(tmp_path / "cluster", str(model), placed=found_by(place)) as cluster,
            Client(cluster.url) as client,
        ):
            async with another_proxy(cluster, model, place) as (process, url, address):
                async with load(client, oracle, seed=520):
                    await runs_on(cluster, "decode")
                    server.kill()
                    process.start()
                    await eventually(lambda: "etcd cannot be reached" in process.tail(), WAIT_S)
                    server.start()
                    await eventually(lambda: serves(url), WAIT_S, "the second proxy has workers")
                    async with Client(url) as other:
                        assert_equal(*await ask_all(other, oracle, cases(6, (50, 300), 8, seed=521)))
                process.kill()

                async def is_forgotten() -> bool:
                    return not (await keys.keys(Place.parse(place).prefix + address)).keys

                await eventually(is_forgotten, WAIT_S, "its lease runs out")

            def is_left() -> bool:
                return all(f"{address} is left" in cluster[name].tail() for name in cluster.workers_named)

            await eventually(is_left, WAIT_S, "workers look for it no more")
            assert [w["state"] for w in (await cluster.workers()).values()] == ["ready", "ready"]
    finally:
        await keys.close()
        server.kill()
