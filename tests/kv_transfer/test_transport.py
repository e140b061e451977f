"""The contract of ``kv_transfer.transport.Connection`` and ``Listener``, over all transports that work
here."""

import asyncio
import itertools
import os
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from common.secret import Secret
from kv_transfer import transport
from kv_transfer.checksum import LibraryHash
from kv_transfer.transport import Connection, Limits, Listener
from kv_transfer.zmq_socket import Socket

TIMEOUT_S = 30.0  # bounds a test that would hang; no behaviour depends on it
LIMITS = Limits(window_bytes=1 << 20)
SIZES = [0, 1, 1000, 4096, 65_536, 100_001, 1 << 20, (4 << 20) + 3]


@pytest.fixture(params=transport.available())
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a listener may be, port 0 included."""
    return {
        "inproc": f"inproc://{tmp_path}",
        "zmq+tcp": "zmq+tcp://127.0.0.1:0",
        "zmq+ipc": f"zmq+ipc://{tmp_path}/socket",
        "ucx": "ucx://127.0.0.1:0",
    }[request.param]


@asynccontextmanager
async def pair(address: str, limits: Limits = LIMITS) -> AsyncIterator[tuple[Connection, Connection]]:
    """Both ends of one connection: that which connected, and that which was accepted."""
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    async with listening(address, accepted, limits) as listener, asyncio.timeout(TIMEOUT_S):
        client = await transport.connect(listener.address, TIMEOUT_S, limits=limits)
        yield client, await accepted.get()
        await client.close()


@asynccontextmanager
async def listening(
    address: str, accepted: asyncio.Queue[Connection], limits: Limits = LIMITS
) -> AsyncIterator[Listener]:
    """A listener that puts what it accepts into ``accepted`` and leaves it open."""

    async def keep(connection: Connection) -> None:
        accepted.put_nowait(connection)
        await asyncio.Event().wait()

    listener = await transport.listen(address, keep, limits=limits)
    try:
        yield listener
    finally:
        await listener.close()


async def read(connection: Connection) -> tuple[bytes, bytes]:
    header, payload_bytes = await connection.receive()
    payload = bytearray(payload_bytes)
    await connection.receive_payload([memoryview(payload)])
    return header, bytes(payload)


async def fill(connection: Connection, payload: bytes) -> int:
    """Send until the peer has no more room. The number of messages it had room for; one more is left pending
    in a task that ends with the connection."""
    sent = 0
    while True:
        task = asyncio.create_task(connection.send(b"fill", [payload]))
        done, _ = await asyncio.wait([task], timeout=1.0)
        if not done:
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            return sent
        await task
        sent += 1


@pytest.mark.parametrize("towards_listener", [True, False])
async def test_messages_of_all_sizes_arrive_whole_and_in_order(address: str, towards_listener: bool) -> None:
    messages = [(f"message {index}".encode(), os.urandom(size)) for index, size in enumerate(SIZES * 2)]
    async with pair(address) as ends:
        sender, receiver = ends if towards_listener else reversed(ends)

        async def send_all() -> None:
            for header, payload in messages:
                await sender.send(header, [payload])

        task = asyncio.create_task(send_all())
        assert [await read(receiver) for _ in messages] == messages
        await task


async def test_both_directions_work_at_the_same_time(address: str) -> None:
    payload = os.urandom(300_000)

    async def talk(end: Connection) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(send_all(end))
            group.create_task(receive_all(end))

    async def send_all(end: Connection) -> None:
        for index in range(20):
            await end.send(b"%d" % index, [payload])

    async def receive_all(end: Connection) -> None:
        for index in range(20):
            assert await read(end) == (b"%d" % index, payload)

    async with pair(address) as (client, server):
        await asyncio.gather(talk(client), talk(server))


async def test_payload_is_gathered_and_scattered_where_the_two_sides_say(address: str) -> None:
    chooser = random.Random(7)
    payload = os.urandom(3_000_000)
    cuts = [0, *sorted(chooser.choices(range(len(payload)), k=40)), len(payload)]
    source = [payload[start:end] for start, end in itertools.pairwise(cuts)]
    target = bytearray(len(payload))
    places = [0, *sorted(chooser.choices(range(len(payload)), k=15)), len(payload)]
    into = [memoryview(target)[start:end] for start, end in itertools.pairwise(places)]
    async with pair(address) as (client, server):
        sending = asyncio.create_task(client.send(b"scattered", source, is_guarded=True))
        assert await server.receive() == (b"scattered", len(payload))
        assert await server.receive_payload(into)
        await sending
    assert bytes(target) == payload


class Odd(LibraryHash):
    """A hash that fails on its second piece, or that never agrees."""

    def __init__(self, num_good: int) -> None:
        super().__init__()
        self._num_good = num_good

    def update(self, source: memoryview) -> None:
        self._num_good -= 1
        if self._num_good < 0:
            raise MemoryError("half way")
        super().update(source)

    def copy(self, source: memoryview, target: memoryview) -> None:
        self.update(source)
        target[:] = source

    def digest(self) -> bytes:
        return os.urandom(8)


def use(monkeypatch: pytest.MonkeyPatch, num_good: int) -> None:
    for module in ("mailbox", "ucx") if "ucx" in transport.available() else ("mailbox",):
        monkeypatch.setattr(f"kv_transfer.{module}.digest_for", lambda num_bytes: Odd(num_good))


async def test_a_message_that_fails_half_way_is_no_part_of_another_peers(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, num_good=1)
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    async with listening(address, accepted) as listener, asyncio.timeout(TIMEOUT_S):
        clients, servers = [], []
        for _ in range(2):
            clients.append(await transport.connect(listener.address, TIMEOUT_S, limits=LIMITS))
            servers.append(await accepted.get())
        with pytest.raises(MemoryError):
            await servers[0].send(b"never whole", [bytes(1 << 20), bytes(1 << 19)], is_guarded=True)
        await servers[1].send(b"whole")
        assert await clients[1].receive() == (b"whole", 0)
        try:
            await servers[0].send(b"whole")
            assert await clients[0].receive() == (b"whole", 0)
        except ConnectionError:
            with pytest.raises(ConnectionError):  # nor is it taken for a message there
                await read(clients[0])
        for client in clients:
            await client.close()


@pytest.mark.parametrize("num_bytes", [100, 70_000, 3_000_001])
@pytest.mark.parametrize("is_altered", [True, False])
async def test_a_guarded_payload_that_was_altered_is_found_out(
    address: str, num_bytes: int, is_altered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_altered:
        use(monkeypatch, num_good=1000)
    payload = os.urandom(num_bytes)
    async with pair(address) as (client, server):
        for _ in range(2):
            target = bytearray(num_bytes)
            parts = [memoryview(payload)[:33], memoryview(payload)[33:]]
            sending = asyncio.create_task(client.send(b"guarded", parts, is_guarded=True))
            assert await server.receive() == (b"guarded", num_bytes)
            assert await server.receive_payload([memoryview(target)]) == (not is_altered)
            await sending
            assert bytes(target) == payload


async def test_a_payload_may_be_overwritten_once_it_was_released(address: str) -> None:
    async with pair(address) as (client, server):
        reading = asyncio.create_task(read_many(server, 3))
        payload = bytearray(700_000)
        for index in range(3):
            payload[:] = bytes([index]) * len(payload)
            released = asyncio.Event()
            await client.send(b"", [payload], released=released.set)
            await released.wait()
            payload[:] = b"\xff" * len(payload)
        assert [set(received) for _, received in await reading] == [{0}, {1}, {2}]


@pytest.mark.parametrize("size", [0, 1000, 3_000_000])
async def test_every_payload_is_released_once(address: str, size: int) -> None:
    begun = itertools.count()
    released: list[int] = []

    async def send(end: Connection, header: bytes = b"") -> None:
        number = next(begun)
        await end.send(header, [bytes(size)], released=lambda: released.append(number))

    async with pair(address) as (client, server):
        sending = asyncio.create_task(for_ever(send, client))
        for _ in range(3):
            await read(server)
        with pytest.raises(ValueError, match="over"):
            await send(client, bytes(2 << 20))
        await server.receive()  # a payload that is under way when all ends
        await server.close()
        with pytest.raises(ConnectionError):
            await sending
        with pytest.raises(ConnectionError):
            await send(client)
        await client.close()
    assert sorted(released) == list(range(next(begun)))


async def for_ever(send: Callable[[Connection], Awaitable[None]], end: Connection) -> None:
    while True:
        await send(end)


async def read_many(connection: Connection, count: int) -> list[tuple[bytes, bytes]]:
    return [await read(connection) for _ in range(count)]


@pytest.mark.parametrize("size", [1, 5_000, 300_000, 3_000_000])
async def test_a_payload_that_nobody_wants_is_skipped(address: str, size: int) -> None:
    async with pair(address) as (client, server):
        for header, payload in ((b"unwanted", bytes(size)), (b"wanted", b"data")):
            sending = asyncio.create_task(client.send(header, [payload]))
            assert await server.receive() == (header, len(payload))
        kept = bytearray(4)
        await server.receive_payload([memoryview(kept)])
        await sending
        assert kept == b"data"


async def test_buffers_of_the_wrong_size_are_refused_and_the_payload_stays(address: str) -> None:
    async with pair(address) as (client, server):
        sending = asyncio.create_task(client.send(b"", [bytes(range(256)) * 1000]))
        await server.receive()
        with pytest.raises(ValueError, match="255999 bytes"):
            await server.receive_payload([memoryview(bytearray(255_999))])
        target = bytearray(256_000)
        await server.receive_payload([memoryview(target)])
        await sending
        assert target == bytes(range(256)) * 1000


async def test_messages_over_the_limits_are_refused_by_name(address: str) -> None:
    limits = replace(LIMITS, max_payload_bytes=1000)
    async with pair(address, limits) as (client, server):
        with pytest.raises(ValueError, match="payload of 1001 bytes"):
            await client.send(b"", [bytes(1001)])
        with pytest.raises(ValueError, match="header of 1048577 bytes"):
            await client.send(bytes((1 << 20) + 1))
        await client.send(bytes(1 << 20), [bytes(1000)])
        assert await read(server) == (bytes(1 << 20), bytes(1000))


async def test_connections_do_not_mix(address: str) -> None:
    async def echo(connection: Connection) -> None:
        while True:
            header, payload = await read(connection)
            await connection.send(header, [payload])

    async def converse(address: str, name: int) -> None:
        connection = await transport.connect(address, TIMEOUT_S)
        for index in range(10):
            payload = bytes([name]) * (1 + 30_000 * index)
            await connection.send(b"%d" % index, [payload])
            assert await read(connection) == (b"%d" % index, payload)
        await connection.close()

    listener = await transport.listen(address, echo)
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(converse(listener.address, name) for name in range(8)))
    await listener.close()


@pytest.mark.parametrize("size", [10, 100_000, 300_000])
async def test_a_peer_that_does_not_read_holds_the_sender_back_and_loses_nothing(
    address: str, size: int
) -> None:
    async with pair(address) as (client, server):
        sent = await fill(client, bytes(size))
        assert sent * size <= LIMITS.window_bytes
        assert [await read(server) for _ in range(sent + 1)] == [(b"fill", bytes(size))] * (sent + 1)
        await client.send(b"after")
        assert await server.receive() == (b"after", 0)


async def test_a_header_sent_at_once_arrives_in_its_turn_or_not_at_all(address: str) -> None:
    async with pair(address) as (client, server):
        await client.send(b"before")
        assert client.send_now(b"now")
        sent = await fill(client, bytes(100_000))
        assert not client.send_now(b"never"), "another message waits for room"
        assert await server.receive() == (b"before", 0)
        assert await server.receive() == (b"now", 0)
        assert [await read(server) for _ in range(sent + 1)] == [(b"fill", bytes(100_000))] * (sent + 1)
        await server.close()
        with pytest.raises(ConnectionError):
            await client.receive()
        assert not client.send_now(b"too late")


async def test_one_peer_that_does_not_read_does_not_hold_up_another(address: str) -> None:
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    async with listening(address, accepted) as listener, asyncio.timeout(TIMEOUT_S):
        slow = await transport.connect(listener.address, TIMEOUT_S, limits=LIMITS)
        to_slow = await accepted.get()
        quick = await transport.connect(listener.address, TIMEOUT_S, limits=LIMITS)
        to_quick = await accepted.get()
        await fill(slow, bytes(100_000))
        await fill(to_slow, bytes(100_000))
        for end, other in ((quick, to_quick), (to_quick, quick)):
            sending = asyncio.create_task(end.send(b"quick", [bytes(2_000_000)]))
            assert await read(other) == (b"quick", bytes(2_000_000))
            await sending
        await slow.close()
        await quick.close()


@pytest.mark.parametrize("closed_by_listener", [True, False])
async def test_closing_ends_pending_calls_on_both_sides(address: str, closed_by_listener: bool) -> None:
    async with pair(address) as (client, server):
        sends = [asyncio.create_task(send_for_ever(end)) for end in (client, server)]
        receives = [asyncio.create_task(drop_one(end)) for end in (client, server)]
        await asyncio.wait(receives)
        await (server if closed_by_listener else client).close()
        for end in (client, server):
            with pytest.raises(ConnectionError):
                await read_for_ever(end)
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionError, ConnectionError]
        await client.close()
        await server.close()


async def drop_one(connection: Connection) -> None:
    await connection.receive()


async def read_for_ever(connection: Connection) -> None:
    while True:
        await read(connection)


async def send_for_ever(connection: Connection) -> None:
    while True:
        await connection.send(b"more", [bytes(300_000)])


@pytest.mark.parametrize("closed_by_listener", [True, False])
async def test_closing_ends_a_pending_receive_on_both_sides(address: str, closed_by_listener: bool) -> None:
    async with pair(address) as (client, server):
        pending = [asyncio.create_task(end.receive()) for end in (client, server)]
        await asyncio.sleep(0)
        await (server if closed_by_listener else client).close()
        for task in pending:
            with pytest.raises(ConnectionError, match="closed by"):
                await task


async def test_what_was_sent_before_the_close_still_arrives(address: str) -> None:
    async with pair(address) as (client, server):
        await client.send(b"last words", [b"and data"])
        await client.close()
        assert await read(server) == (b"last words", b"and data")
        with pytest.raises(ConnectionError, match="closed by the peer"):
            await server.receive()


async def test_nothing_can_be_done_on_a_closed_connection(address: str) -> None:
    async with pair(address) as (client, _):
        await client.close()
        with pytest.raises(ConnectionError, match="closed by this side"):
            await client.send(b"")
        with pytest.raises(ConnectionError, match="closed by this side"):
            await client.receive()


async def test_a_connection_is_closed_when_its_handler_ends(address: str) -> None:
    async def refuse(connection: Connection) -> None:
        await connection.send(b"not you")

    listener = await transport.listen(address, refuse)
    async with asyncio.timeout(TIMEOUT_S):
        connection = await transport.connect(listener.address, TIMEOUT_S)
        assert await connection.receive() == (b"not you", 0)
        with pytest.raises(ConnectionError):
            await connection.receive()
    await listener.close()


async def test_a_handler_that_fails_is_logged_and_ends_its_connection_alone(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(connection: Connection) -> None:
        header, _ = await connection.receive()
        if header == b"fail":
            raise ZeroDivisionError("a bug in the handler")
        await connection.send(b"fine")

    listener = await transport.listen(address, fail)
    async with asyncio.timeout(TIMEOUT_S):
        bad = await transport.connect(listener.address, TIMEOUT_S)
        good = await transport.connect(listener.address, TIMEOUT_S)
        await bad.send(b"fail")
        with pytest.raises(ConnectionError):
            await bad.receive()
        await good.send(b"work")
        assert await good.receive() == (b"fine", 0)
        await bad.close()
        await good.close()
    await listener.close()
    assert "a bug in the handler" in caplog.text


async def test_a_cancelled_send_ends_the_connection(address: str) -> None:
    async with pair(address) as (client, server):
        while True:
            sending = asyncio.create_task(client.send(b"fill", [bytes(400_000)]))
            done, _ = await asyncio.wait([sending], timeout=0.5)
            if not done:
                break
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(ConnectionError, match="cancelled"):
            await client.send(b"after")
        with pytest.raises(ConnectionError):
            await read_for_ever(server)


async def test_a_cancelled_receive_loses_nothing(address: str) -> None:
    async with pair(address) as (client, server):
        receiving = asyncio.create_task(server.receive())
        await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await client.send(b"kept", [b"payload"])
        assert await read(server) == (b"kept", b"payload")


async def test_a_listener_frees_its_address_and_ends_its_connections(address: str) -> None:
    for _ in range(3):
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        async with asyncio.timeout(TIMEOUT_S), listening(address, accepted) as listener:
            address = listener.address  # the port that was free before, if it was 0
            connection = await transport.connect(address, TIMEOUT_S)
            await connection.send(b"hello", [b"payload"])
            assert await read(await accepted.get()) == (b"hello", b"payload")
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(ConnectionError):
                await connection.receive()
        await connection.close()
        with pytest.raises(ConnectionError):
            await transport.connect(address, TIMEOUT_S)


async def test_an_address_in_use_is_refused_by_name(address: str) -> None:
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    async with listening(address, accepted) as listener:
        with pytest.raises(OSError, match=re.escape(listener.address)):
            async with listening(listener.address, accepted):
                pass


async def test_closing_a_listener_twice_is_harmless(address: str) -> None:
    async with listening(address, asyncio.Queue()) as listener:
        await listener.close()


async def test_waiting_costs_no_processor_time(address: str) -> None:
    async with pair(address) as (client, server):
        sending = asyncio.create_task(client.send(b"warm up", [bytes(400_000)]))
        await read(server)
        await sending
        waiting = [asyncio.create_task(read(end)) for end in (client, server)]
        await asyncio.wait(waiting, timeout=0.3)
        before = time.process_time()
        await asyncio.wait(waiting, timeout=1.0)
        assert time.process_time() - before < 0.5
        for task in waiting:
            task.cancel()


async def test_connecting_and_closing_again_and_again_leaks_no_descriptor(address: str) -> None:
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    async with listening(address, accepted) as listener, asyncio.timeout(TIMEOUT_S):
        before = await settled_descriptors(listener, accepted, cycles=5)
        after = await settled_descriptors(listener, accepted, cycles=60)
        assert after <= before + 8


async def settled_descriptors(listener: Listener, accepted: asyncio.Queue[Connection], cycles: int) -> int:
    """Open descriptors of this process after ``cycles`` connections were made and closed, once no more go
    away."""
    for _ in range(cycles):
        connection = await transport.connect(listener.address, TIMEOUT_S)
        await connection.close()
        with pytest.raises(ConnectionError):
            await (await accepted.get()).receive()
    number = len(os.listdir("/proc/self/fd"))
    while True:
        await asyncio.sleep(0.2)
        if number <= (number := len(os.listdir("/proc/self/fd"))):
            return number


@pytest.mark.parametrize("scheme", ["zmq+tcp", "zmq+ipc"])
async def test_a_secret_lets_in_who_has_it_and_nobody_else(scheme: str, tmp_path: Path) -> None:
    place = "127.0.0.1:0" if scheme == "zmq+tcp" else f"{tmp_path}/socket"
    secret = Secret.new()
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    async with listening(f"{scheme}://{place}", accepted, Limits(secret=secret)) as listener:
        for other in (Secret.new(), None):
            with pytest.raises((ConnectionError, TimeoutError)):
                await transport.connect(listener.address, TIMEOUT_S, limits=Limits(secret=other))
        assert accepted.empty()
        client = await transport.connect(listener.address, TIMEOUT_S, limits=Limits(secret=secret))
        async with asyncio.timeout(TIMEOUT_S):
            server = await accepted.get()
            await client.send(b"header", [b"payload" * 100_000])
            assert await read(server) == (b"header", b"payload" * 100_000)
        await client.close()


async def test_a_socket_that_takes_no_greeting_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a handshake that has failed at once."""
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    async with listening("zmq+tcp://127.0.0.1:0", accepted) as listener:

        def takes_nothing(*_: object) -> None:
            raise zmq.Again

        with monkeypatch.context() as patched:
            patched.setattr(Socket, "post", takes_nothing)
            with pytest.raises(ConnectionError, match="the peer is gone"):
                await transport.connect(listener.address, TIMEOUT_S, limits=LIMITS)
        client = await transport.connect(listener.address, TIMEOUT_S, limits=LIMITS)
        await client.close()
