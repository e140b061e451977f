"""``kv_transfer.ring``: memory that two sides share, and what is refused of it."""

import asyncio
import os
import random
import struct
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from common.config import WorkerConfig
from kv_transfer import transport
from kv_transfer.addresses import listen_address
from kv_transfer.ring import START, Ring
from kv_transfer.transport import Connection

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
WINDOW = 100_000
TIMEOUT_S = 30.0


def made() -> Ring:
    ring = Ring.create(WINDOW)
    assert ring is not None
    return ring


def opened(ring: Ring) -> Ring:
    other = Ring.open(ring.where)
    assert other is not None
    return other


def test_what_one_side_writes_the_other_reads() -> None:
    ring = made()
    other = opened(ring)
    ring.was_opened()
    place = ring.write([b"one", memoryview(b""), b"two"])
    found = other.read(place)
    assert found is not None and bytes(found) == b"onetwo"


def test_payloads_within_the_window_never_overlap_however_long_they_are() -> None:
    """The sender knows only how much is under way, never what."""
    ring, chooser = made(), random.Random(1)
    other = opened(ring)
    under_way: deque[tuple[bytes, bytes]] = deque()
    for _ in range(3000):
        payload = bytes([chooser.randrange(256)]) * chooser.randint(1, WINDOW // 2)
        while under_way and sum(len(sent) for _, sent in under_way) + len(payload) > WINDOW:
            place, sent = under_way.popleft()
            found = other.read(place)
            assert found is not None and bytes(found) == sent
        under_way.append((ring.write([payload]), payload))


@pytest.mark.parametrize(
    "place",
    [
        b"",
        b"short",
        struct.pack(">QQ", 0, 10),
        struct.pack(">QQ", START, 0),
        struct.pack(">QQ", START, 1 << 40),
    ],
)
def test_a_place_outside_of_the_ring_is_none(place: bytes) -> None:
    ring = made()
    assert opened(ring).read(place) is None
    ring.was_opened()


def flipped(where: bytes) -> bytes:
    return where[:-1] + bytes([where[-1] ^ 1])


def longer(where: bytes) -> bytes:
    process, number, size, token = struct.unpack(">QQQ16s", where)
    return struct.pack(">QQQ16s", process, number, size + 1, token)


@pytest.mark.parametrize(
    "change", [flipped, longer, lambda where: where[:-1], lambda where: b"x" * len(where)]
)
def test_what_is_not_the_ring_that_was_told_of_is_not_opened(change: Callable[[bytes], bytes]) -> None:
    ring = made()
    assert Ring.open(change(ring.where)) is None
    ring.was_opened()


def test_memory_that_could_be_cut_short_under_our_eyes_is_not_opened() -> None:
    """Reading behind its end would kill the reader."""
    ring = made()
    *_, size, token = struct.unpack(">QQQ16s", ring.where)
    ring.was_opened()
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, token, 0)
    assert Ring.open(struct.pack(">QQQ16s", os.getpid(), descriptor, size, token)) is None
    os.close(descriptor)


def test_a_ring_keeps_no_descriptor_once_both_sides_are_gone() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        ring = made()
        other = opened(ring)
        ring.was_opened()
        del ring, other
    assert len(os.listdir("/proc/self/fd")) == before


async def payloads_through(path: Path, num: int) -> list[bytes]:
    """Received by a listener at ``path``, until the connection ends."""
    found: list[bytes] = []
    ended = asyncio.Event()

    async def keep(connection: Connection) -> None:
        try:
            for _ in range(num):
                _, payload_bytes = await connection.receive()
                payload = bytearray(payload_bytes)
                await connection.receive_payload([memoryview(payload)])
                found.append(bytes(payload))
        finally:
            ended.set()

    listener = await transport.listen(f"zmq+ipc://{path}", keep)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            connection = await transport.connect(listener.address, TIMEOUT_S)
            for index in range(num):
                await connection.send(b"", [bytes([index]) * 300_000, b"end"])
            await ended.wait()
            await connection.close()
    finally:
        await listener.close()
    return found


EXPECTED = [bytes([index]) * 300_000 + b"end" for index in range(50)]


async def test_payloads_of_workers_on_one_machine_go_through_a_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[bytes] = []

    def read(ring: Ring, place: memoryview) -> memoryview | None:
        places.append(bytes(place))
        return original(ring, place)

    original = Ring.read
    monkeypatch.setattr(Ring, "read", read)
    assert await payloads_through(tmp_path / "socket", 50) == EXPECTED
    assert len(places) == 50


async def test_without_a_ring_in_reach_payloads_go_through_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ring, "open", lambda where: None)
    assert await payloads_through(tmp_path / "socket", 50) == EXPECTED


async def test_a_peer_whose_payload_lies_nowhere_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ring, "write", lambda *_: struct.pack(">QQ", START, 1 << 40))
    with pytest.raises(ConnectionError, match="outside of the ring"):
        await payloads_through(tmp_path / "socket", 50)


@pytest.mark.parametrize(
    ("bind_host", "advertise_host", "scheme"),
    [("127.0.0.1", "", "zmq+ipc"), ("127.0.0.1", "gate", "zmq+tcp"), ("0.0.0.0", "", "zmq+tcp")],
)
def test_auto_shares_memory_with_those_who_can_only_be_on_this_machine(
    bind_host: str, advertise_host: str, scheme: str
) -> None:
    worker = WorkerConfig(bind_host=bind_host, advertise_host=advertise_host)
    assert listen_address("auto", worker, "0a1b").partition("://")[0] == scheme
