"""Peers that die, fall silent, do not read, or speak something else."""

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer import transport
from kv_transfer.transport import Connection, Limits
from tests.kv_transfer.peer_process import started

TIMEOUT_S = 60.0  # bounds a test that would hang; no behaviour depends on it
BETWEEN_PROCESSES = [scheme for scheme in transport.available() if scheme != "inproc"]
PROMPT = Limits(window_bytes=2 << 20, ping_interval_s=0.1, silence_timeout_s=2.0)
GIANT_FRAME = b"\x02" + struct.pack(">Q", 1 << 62)
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
ZMTP_READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


@pytest.fixture(params=BETWEEN_PROCESSES)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return address_of(request.param, tmp_path)


@pytest.fixture(params=[scheme for scheme in BETWEEN_PROCESSES if scheme != "ucx"])
def zmq_address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return address_of(request.param, tmp_path)


def address_of(scheme: str, directory: Path) -> str:
    return f"{scheme}://{directory}/socket" if scheme == "zmq+ipc" else f"{scheme}://127.0.0.1:0"


@asynccontextmanager
async def connected(
    role: str, address: str, limits: Limits = PROMPT
) -> AsyncIterator[tuple[Connection, asyncio.subprocess.Process]]:
    """A connection to a process that listens or connects. It echoes."""
    if role == "listen":
        async with started("listen", address) as (process, bound):
            connection = await transport.connect(bound, TIMEOUT_S, limits=limits)
            yield connection, process
            await connection.close()
        return
    accepted: asyncio.Queue[Connection] = asyncio.Queue()

    async def keep(connection: Connection) -> None:
        accepted.put_nowait(connection)
        await asyncio.Event().wait()

    listener = await transport.listen(address, keep, limits=limits)
    try:
        async with started("connect", listener.address) as (process, _):
            connection = await accepted.get()
            assert await connection.receive() == (b"hello", 0)
            yield connection, process
    finally:
        await listener.close()


async def send_for_ever(connection: Connection) -> None:
    while True:
        await connection.send(b"more", [bytes(400_000)])


async def receive_for_ever(connection: Connection) -> None:
    while True:
        await connection.receive()


@pytest.mark.parametrize("role", ["listen", "connect"])
@pytest.mark.parametrize("activity", [send_for_ever, receive_for_ever])
async def test_the_death_of_the_peer_ends_pending_calls(
    address: str, role: str, activity: Callable[[Connection], Awaitable[None]]
) -> None:
    async with asyncio.timeout(TIMEOUT_S), connected(role, address) as (connection, process):
        await connection.send(b"stop reading")
        pending = asyncio.ensure_future(activity(connection))
        await asyncio.wait([pending], timeout=0.5)
        process.kill()
        with pytest.raises(ConnectionError):
            await pending
        with pytest.raises(ConnectionError):
            await connection.send(b"more")


@pytest.mark.parametrize("role", ["listen", "connect"])
@pytest.mark.parametrize("activity", [send_for_ever, receive_for_ever])
async def test_a_peer_that_stopped_running_is_taken_for_dead(
    address: str, role: str, activity: Callable[[Connection], Awaitable[None]]
) -> None:
    async with asyncio.timeout(TIMEOUT_S), connected(role, address) as (connection, process):
        pending = asyncio.ensure_future(activity(connection))
        await asyncio.wait([pending], timeout=0.2)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectionError, match="silent"):
            await pending
        process.send_signal(signal.SIGCONT)


async def test_a_peer_held_up_until_we_have_left_does_not_wait_for_our_payload(address: str) -> None:
    """The process ends by itself: its connection has ended and it has no other."""
    async with asyncio.timeout(TIMEOUT_S), connected("connect", address) as (connection, process):
        await connection.send(b"hold up", [bytes(4 << 20)])
        with pytest.raises(ConnectionError, match="silent"):
            await connection.receive()
        await process.wait()


@pytest.mark.parametrize("by_death", [True, False])
async def test_a_buffer_is_left_alone_once_receiving_into_it_has_ended(address: str, by_death: bool) -> None:
    async with asyncio.timeout(TIMEOUT_S), connected("listen", address) as (connection, process):
        sending = asyncio.create_task(connection.send(b"echo", [bytes(16 << 20)]))
        await connection.receive()
        await sending
        target = bytearray(b"?" * (16 << 20))
        receiving = asyncio.create_task(connection.receive_payload([memoryview(target)]))
        await asyncio.wait([receiving], timeout=0.002)
        if by_death:
            process.kill()
        else:
            receiving.cancel()
        await asyncio.wait([receiving])
        found = bytes(target)
        await asyncio.wait([asyncio.create_task(connection.receive())], timeout=0.5)
        assert target == found
        assert receiving.cancelled() or receiving.exception() is not None or not any(found)


async def test_a_peer_that_was_taken_for_dead_learns_it_when_it_runs_again(address: str) -> None:
    """The process ends by itself: its connection has ended and it has no other."""
    async with asyncio.timeout(TIMEOUT_S), connected("connect", address) as (connection, process):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectionError, match="silent"):
            await connection.receive()
        process.send_signal(signal.SIGCONT)
        assert await process.wait() == 1


async def test_a_slow_but_living_peer_is_not_taken_for_dead(address: str) -> None:
    async with asyncio.timeout(TIMEOUT_S), connected("listen", address) as (connection, _):
        await connection.send(b"stop reading")
        pending = asyncio.ensure_future(send_for_ever(connection))
        done, _ = await asyncio.wait([pending], timeout=2 * PROMPT.silence_timeout_s)
        assert not done
        pending.cancel()
        await asyncio.wait([pending])


async def test_a_stall_of_our_own_loop_is_not_taken_for_silence(address: str) -> None:
    async with asyncio.timeout(TIMEOUT_S), connected("listen", address) as (connection, process):
        process.send_signal(signal.SIGSTOP)  # so that nothing is waiting in the socket after the stall
        # The stall itself: the loop runs nothing while this blocks.
        signal.sigtimedwait([], PROMPT.silence_timeout_s * 1.5)
        process.send_signal(signal.SIGCONT)
        await connection.send(b"alive")
        assert await connection.receive() == (b"alive", 0)


async def test_memory_stays_bounded_when_the_peer_does_not_read(address: str) -> None:
    async with asyncio.timeout(TIMEOUT_S), connected("listen", address) as (connection, process):
        payload = bytes(400_000)
        for _ in range(20):  # what a connection needs anyway
            await connection.send(b"echo", [payload])
            await connection.receive()
            await connection.receive_payload([memoryview(bytearray(payload))])
        await connection.send(b"stop reading")
        before = resident_bytes(os.getpid()), resident_bytes(process.pid)
        pending = asyncio.ensure_future(send_for_ever(connection))
        await asyncio.wait([pending], timeout=2.0)
        after = resident_bytes(os.getpid()), resident_bytes(process.pid)
        assert not pending.done()
        assert all(late - early < 4 * PROMPT.window_bytes for early, late in zip(before, after, strict=True))
        pending.cancel()
        await asyncio.wait([pending])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(os.urandom(100_000), id="random"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="http"),
        pytest.param(b"\xff" * 100_000, id="ones"),
        pytest.param(bytes(100_000), id="zeros"),
        pytest.param(struct.pack(">Q", 1 << 62) * 100, id="lengths"),
        pytest.param(ZMTP_GREETING + ZMTP_READY + GIANT_FRAME + bytes(1000), id="giant frame"),
        pytest.param(ZMTP_GREETING[:20], id="half a greeting"),
    ],
)
async def test_a_stranger_neither_harms_nor_blocks_a_listener(address: str, noise: bytes) -> None:
    async with asyncio.timeout(TIMEOUT_S), started("listen", address) as (process, bound):
        before = resident_bytes(process.pid)
        strangers = [await call(bound) for _ in range(5)]
        for _, writer in strangers:
            writer.write(noise)
        connection = await transport.connect(bound, TIMEOUT_S)
        await connection.send(b"friend", [bytes(400_000)])
        assert await connection.receive() == (b"friend", 400_000)
        assert process.returncode is None
        assert resident_bytes(process.pid) - before < 64 << 20
        for _, writer in strangers:
            writer.close()
        await connection.close()


async def call(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("zmq+ipc://"):
        return await asyncio.open_unix_connection(address.removeprefix("zmq+ipc://"))
    return await asyncio.open_connection(*transport.host_and_port(address))


async def test_connecting_to_a_server_that_says_nothing_times_out(zmq_address: str) -> None:
    async with silent_server(zmq_address) as bound, asyncio.timeout(TIMEOUT_S):
        with pytest.raises(TimeoutError, match="did not answer within"):
            await transport.connect(bound, 0.5)


async def test_connecting_to_a_server_of_another_kind_fails(zmq_address: str) -> None:
    async with silent_server(zmq_address, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10) as bound:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(ConnectionError):
                await transport.connect(bound, TIMEOUT_S)


@asynccontextmanager
async def silent_server(address: str, answer: bytes = b"") -> AsyncIterator[str]:
    """Accepts, and says nothing but ``answer``."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(answer)

    if address.startswith("zmq+ipc://"):
        server = await asyncio.start_unix_server(accept, address.removeprefix("zmq+ipc://"))
        bound = address
    else:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        bound = f"zmq+tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield bound
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def test_a_listener_takes_the_place_of_a_dead_one(address: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        async with started("listen", address) as (process, bound):
            connection = await transport.connect(bound, TIMEOUT_S)
            process.kill()
            with pytest.raises(ConnectionError):
                await connection.receive()
        async with started("listen", bound) as (_, bound):
            connection = await transport.connect(bound, TIMEOUT_S)
            await connection.send(b"again")
            assert await connection.receive() == (b"again", 0)
            await connection.close()
