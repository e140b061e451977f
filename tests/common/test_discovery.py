"""Announced, found, and lost again: with a real etcd."""

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from common.config import ConfigError, NetworkConfig
from common.discovery import Place, announce, follow
from common.etcd import Etcd, EtcdError
from tests.etcd import EtcdServer

WAIT_S = 60.0
TTL_S = 2
ONE, OTHER = "tcp://10.0.0.1:7000", "tcp://proxy-2:7001"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def place(server: EtcdServer, request: pytest.FixtureRequest) -> Place:
    """Where nobody else is. Nothing answers at the first of its endpoints."""
    return Place.parse(f"etcd://127.0.0.1:1,{server.host}/{request.node.name}")


class Follower:
    def __init__(self) -> None:
        self.found: frozenset[str] | None = None
        self._told = asyncio.Condition()

    def tell(self, found: frozenset[str]) -> None:
        self.found = found
        self._tasks = [asyncio.create_task(self._notify())]

    async def _notify(self) -> None:
        async with self._told:
            self._told.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._told:
            await self._told.wait_for(condition)

    async def finds(self, *addresses: str) -> None:
        await self.until(lambda: self.found == frozenset(addresses))


@asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def following(place: Place) -> AsyncIterator[Follower]:
    follower = Follower()
    async with running(follow(place, follower.tell)):
        yield follower


async def test_who_comes_is_found_and_who_goes_is_gone_at_once(place: Place) -> None:
    async with following(place) as early, running(announce(place, ONE)):
        await early.finds(ONE)
        async with running(announce(place, OTHER)), following(place) as late:
            await early.finds(ONE, OTHER)
            await late.finds(ONE, OTHER)
        await early.finds(ONE)


async def test_who_dies_without_a_word_is_gone_when_the_lease_has_run_out(place: Place) -> None:
    etcd = Etcd(place.endpoints)
    try:
        await etcd.put(place.prefix + OTHER, OTHER, await etcd.grant(TTL_S))  # and never renewed
        async with following(place) as follower, running(announce(place, ONE, TTL_S)):
            await follower.finds(ONE, OTHER)
            await follower.finds(ONE)
    finally:
        await etcd.close()


async def lease_of(server: EtcdServer, key: str) -> str:
    """Of the key; empty where there is none."""
    body = {"key": b64encode(key.encode()).decode()}
    async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as client:
        entries = (await client.post(f"http://{server.host}/v3/kv/range", json=body)).json().get("kvs", [])
    return str(entries[0]["lease"]) if entries else ""


async def test_a_lease_that_was_lost_is_taken_anew(place: Place, server: EtcdServer) -> None:
    etcd = Etcd(place.endpoints)
    try:
        async with following(place) as follower, running(announce(place, ONE, TTL_S)):
            await follower.finds(ONE)
            lost = await lease_of(server, place.prefix + ONE)
            await etcd.revoke(lost)
            async with asyncio.timeout(WAIT_S):
                while await lease_of(server, place.prefix + ONE) in ("", lost):
                    await asyncio.sleep(0.05)
    finally:
        await etcd.close()


async def test_what_is_no_address_is_not_looked_at(place: Place) -> None:
    etcd = Etcd(place.endpoints)
    try:
        lease = await etcd.grant(TTL_S)
        for odd in ("", "ipc://x", "tcp://host", "tcp://host:1/path"):
            await etcd.put(place.prefix + odd, "", lease)
        async with following(place) as follower, running(announce(place, ONE)):
            await follower.finds(ONE)
    finally:
        await etcd.close()


async def test_etcd_may_come_late_go_and_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = EtcdServer(tmp_path)
    place = Place.parse(f"etcd://{own.host}")
    caplog.set_level(logging.INFO, "common.discovery")

    async def until_told(text: str, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while sum(text in message for message in caplog.messages) < count:
                await asyncio.sleep(0.02)

    try:
        async with following(place) as follower, running(announce(place, ONE, TTL_S)):
            await until_told("cannot be reached", 2)  # by both
            own.start()
            await follower.finds(ONE)
            own.kill()
            await until_told("cannot be reached", 4)
            assert follower.found == frozenset((ONE,))
            async with running(announce(place, OTHER)):
                own.start()
                await follower.finds(ONE, OTHER)
            await until_told("answers again", 4)
    finally:
        own.kill()


async def test_an_answer_that_is_not_etcds_is_an_error_that_names_the_endpoint() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]")
        await writer.drain()
        writer.close()

    impostor = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{impostor.sockets[0].getsockname()[1]}"
    etcd = Etcd([url])
    try:
        for call in (etcd.grant(2), etcd.keys("x/"), etcd.change("x/", 1), etcd.renew("1")):
            with pytest.raises(EtcdError, match=url):
                await call
    finally:
        await etcd.close()
        impostor.close()


@pytest.mark.parametrize("text", ["etcd://", "http://h:1", "etcd://h", "etcd://h:1,", "etcd://u:p@h:1/x"])
def test_an_address_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--discovery"):
        NetworkConfig(discovery=text)


def test_the_prefix_of_keys_is_what_follows_the_endpoints() -> None:
    assert Place.parse("etcd://a:1,b:2/x/y/") == (("http://a:1", "http://b:2"), "x/y/proxies/")
    assert Place.parse("etcd://a:1").prefix == "baton/proxies/"
