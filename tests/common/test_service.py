import asyncio
import logging

import pytest
from msgspec.structs import replace

from common import proxies
from common.config import StopConfig, WorkerConfig
from common.messages import Generate, Status
from common.pool import CacheEvents
from common.sequence import SequenceKey
from common.service import Service
from tests.proxy.scripted import status_of

TIMEOUT_S = 30.0


class Idle:
    """A role with nothing to do, and its book of blocks."""

    def status(self, draining: bool) -> Status:
        return status_of("decode", "d1", draining=draining)

    def generate(self, message: Generate) -> None: ...

    def abort(self, key: SequenceKey, reason: str) -> None: ...

    def idle(self) -> bool:
        return True

    def drain(self) -> None: ...

    def take_events(self) -> CacheEvents:
        return CacheEvents((), ())

    def cached_hashes(self) -> tuple[CacheEvents, tuple[bytes, ...]]:
        return CacheEvents((), ()), ()


async def test_a_proxy_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(proxies, "UNHEARD_S", 0.0)
    address = "tcp://127.0.0.1:1"
    role = Idle()
    tested = Service(WorkerConfig(proxies=(address,)), StopConfig(), "d1", role, role)
    with caplog.at_level(logging.WARNING):
        running = asyncio.create_task(tested.run())
        async with asyncio.timeout(TIMEOUT_S):
            while not any(address in message for message in caplog.messages):
                await asyncio.sleep(0.01)
            tested.drain()
            await running


def test_what_an_operator_says_of_a_workers_place_counts_more_than_what_it_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = replace(status_of("decode", "d1"), locality={"nvlink": "GPU-1", "numa": "GPU-0"})
    monkeypatch.setattr(Idle, "status", lambda *_: found)
    config = WorkerConfig(proxies=("tcp://127.0.0.1:1",), locality=("host=a", "numa=north"))
    status = Service(config, StopConfig(), "d1", Idle(), Idle()).status()
    assert status.locality == {"nvlink": "GPU-1", "numa": "north", "host": "a"}
