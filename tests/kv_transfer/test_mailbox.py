"""Peers that speak the carrier's language and not ours: a raw DEALER against a listener."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from common.seal import DIGEST_BYTES, is_whole
from kv_transfer import transport
from kv_transfer.mailbox import VERSION, Kind, headed, hello
from kv_transfer.transport import Connection, Limits

TIMEOUT_S = 30.0
LIMITS = Limits(max_payload_bytes=100_000, window_bytes=1 << 20)
HELLO = hello(LIMITS)
GREETING = HELLO[1:-DIGEST_BYTES]


@asynccontextmanager
async def stranger(
    does_read: bool = True,
) -> AsyncIterator[tuple["zmq.asyncio.Socket", list[tuple[bytes, int]], list[str]]]:
    """A DEALER connected to a listener, the messages that the listener's handler reads, and how it ended."""
    received: list[tuple[bytes, int]] = []
    ends: list[str] = []

    async def collect(connection: Connection) -> None:
        if not does_read:
            await asyncio.Event().wait()
        try:
            while True:
                received.append(await connection.receive())
        except ConnectionError as error:
            ends.append(str(error))

    listener = await transport.listen("zmq+tcp://127.0.0.1:0", collect, limits=LIMITS)
    try:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(listener.address.removeprefix("zmq+"))
            async with asyncio.timeout(TIMEOUT_S):
                yield socket, received, ends
    finally:
        await listener.close()


async def answer(socket: "zmq.asyncio.Socket", kind: Kind) -> bytes:
    """The next answer of that kind, without its kind and digest."""
    while True:
        parts = await socket.recv_multipart()
        if parts[0][0] == kind:
            assert is_whole(parts[0][:-DIGEST_BYTES], parts[0][-DIGEST_BYTES:])
            return parts[0][1:-DIGEST_BYTES]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([[headed(Kind.DATA, b"header")]], "ended before"),
        ([[b"\x80\x04pickle"]], "ended before"),
        ([[headed(Kind.HELLO)]], "not a greeting"),
        ([[headed(Kind.HELLO, b"bacon" + GREETING[5:])]], "not a greeting"),
        ([[headed(Kind.HELLO, GREETING[:5] + b"\x63" + GREETING[6:])]], f"versions 99 and {VERSION}"),
        ([[headed(Kind.HELLO, GREETING[:5] + b"\x01" + GREETING[6:]), b"ring"]], f"versions 1 and {VERSION}"),
        ([[headed(Kind.HELLO, GREETING[:6] + bytes(16))]], "window of 0 bytes"),
        ([[HELLO[:-1] + b"?"]], "damaged"),
        ([[HELLO], [headed(Kind.DATA, b"true")[:-1] + b"?"]], "damaged"),
        ([[HELLO], [b"\x03falsehood" + headed(Kind.DATA, b"true")[-DIGEST_BYTES:]]], "damaged"),
        ([[HELLO], [HELLO]], "not of this protocol"),
        ([[HELLO], [headed(Kind.CREDIT, b"123")]], "not of this protocol"),
        ([[HELLO], [b"\xfe"]], "not of this protocol"),
        ([[HELLO], [headed(Kind.GUARDED, b"7 bytes")]], "not of this protocol"),
        ([[HELLO], [bytes(100_001), headed(Kind.DATA)]], "over the limit"),
        ([[HELLO], [*[bytes(1000)] * 101, headed(Kind.DATA)]], "over the limit"),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_told_so_and_cut_off(
    messages: list[list[bytes]], reason: str
) -> None:
    async with stranger() as (socket, received, _):
        for message in messages:
            await socket.send_multipart(message)
        assert reason in (await answer(socket, Kind.BYE)).decode()
        assert received == []


async def test_a_peer_that_sends_more_than_its_window_is_cut_off() -> None:
    async with stranger(does_read=False) as (socket, _, _):
        await socket.send(HELLO)
        await answer(socket, Kind.WELCOME)
        for _ in range(300):
            await socket.send(headed(Kind.DATA, bytes(4096)))
        assert "more was sent than the window" in (await answer(socket, Kind.BYE)).decode()


async def test_empty_and_credit_messages_do_no_harm() -> None:
    async with stranger() as (socket, received, ends):
        await socket.send(HELLO)
        await socket.send(b"")
        await socket.send(headed(Kind.CREDIT, b"\xff" * 8))
        await socket.send(headed(Kind.DATA, b"still here"))
        await socket.send(headed(Kind.BYE, b"\xff\xfe enough"))
        while not ends:
            await asyncio.sleep(0)
        assert received == [(b"still here", 0)]
        assert "enough" in ends[0]


async def test_a_peer_that_greets_and_falls_silent_is_dropped() -> None:
    quick = Limits(ping_interval_s=0.05, silence_timeout_s=0.3)
    ended = asyncio.Event()

    async def wait(connection: Connection) -> None:
        with pytest.raises(ConnectionError, match="silent"):
            await connection.receive()
        ended.set()

    listener = await transport.listen("zmq+tcp://127.0.0.1:0", wait, limits=quick)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(listener.address.removeprefix("zmq+"))
        await socket.send(HELLO)
        async with asyncio.timeout(TIMEOUT_S):
            await ended.wait()
    await listener.close()
