"""A connection over anything that carries whole messages in order, which ZeroMQ sockets and a queue both do.

What such carriers lack is added here, the same for all of them:

1. ``HELLO`` from the side that connects, ``WELCOME`` back: both know the other's limits.
2. ``DATA`` while the peer has room: its window counts the bytes that are under way or received and not yet
   read. ``CREDIT`` returns room as messages are read, so neither side ever holds more than a window for a
   slow reader.
3. ``PING`` on a timer. A peer that was silent for too long is dead, however its socket looks.
4. ``BYE`` ends the connection after everything sent before it.

The first part of each message is one byte of kind and the header; further parts are the payload.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from kv_transfer.memory import Buffer, scatter
from kv_transfer.transport import MAX_HEADER_BYTES, Limits

VERSION = 1
MESSAGE_COST = (
    4096  # added to the size of each message, so that a window also bounds the number of small ones
)
_GREETING = struct.Struct(">5sBQQ")  # magic, version, window, largest payload
_CREDIT = struct.Struct(">Q")
_MAGIC = b"baton"


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    DATA = 3
    CREDIT = 4
    PING = 5
    BYE = 6


class Wire(Protocol):
    """Carries the messages of one connection to its peer."""

    def post(self, parts: Sequence[Buffer]) -> None:
        """Take a message without waiting and without keeping ``parts``. Raises ``ConnectionError``."""
        ...

    def close(self) -> None:
        """Drop the peer once what was posted is out. Called once."""
        ...


class Message(NamedTuple):
    header: bytes
    payload: Sequence[Buffer]
    payload_bytes: int


class Window:
    """Room that the peer still has for our messages."""

    def __init__(self) -> None:
        self.size = 0  # until the peer has told
        self._room = 0
        self._changed = asyncio.Event()

    def open(self, size: int) -> None:
        self.size = self._room = size
        self._changed.set()

    def cost(self, message_bytes: int) -> int:
        return cost(message_bytes, self.size)

    def try_take(self, amount: int) -> bool:
        if amount > self._room:
            self._changed.clear()
            return False
        self._room -= amount
        return True

    async def changed(self) -> None:
        await self._changed.wait()

    def give(self, amount: int) -> None:
        self._room = min(self._room + amount, self.size)
        self._changed.set()

    def shut(self) -> None:
        self._changed.set()


def cost(message_bytes: int, window_bytes: int) -> int:
    """What a message takes of a window. Half of it at most: credit is returned late by up to a quarter, and a
    message of any size must fit in what remains."""
    return min(message_bytes + MESSAGE_COST, window_bytes // 2)


def greeting(kind: Kind, limits: Limits) -> bytes:
    return bytes([kind]) + _GREETING.pack(_MAGIC, VERSION, limits.window_bytes, limits.max_payload_bytes)


def farewell(reason: str) -> bytes:
    return bytes([Kind.BYE]) + reason.encode()


class MailboxConnection:
    """The ``Connection`` of carriers that move whole messages. The carrier calls ``deliver`` and ``lose``."""

    def __init__(self, peer: str, wire: Wire, limits: Limits) -> None:
        self._peer = peer
        self._wire = wire
        self._limits = limits
        self._window = Window()
        self._peer_max_payload = 0
        self._opened = asyncio.Event()
        self._arrived = asyncio.Event()
        self._inbox: deque[Message] = deque()
        self._inbox_cost = 0
        self._current: Message | None = None  # header read, payload not yet
        self._owed = 0  # credit to return
        self._lost: str | None = None
        self._silent_ticks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limits.ping_interval_s, self._tick)

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def was_open(self) -> bool:
        """Whether the peer has ever answered."""
        return self._window.size > 0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set() and self._lost is None

    async def opened(self) -> None:
        """Wait until the peer has answered. Raises ``ConnectionError`` when it is lost before."""
        await self._opened.wait()
        self._check_alive()

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        self._check_alive()
        payload_bytes = sum(memoryview(buffer).nbytes for buffer in payload)
        self._check_size(len(header), payload_bytes)
        amount = self._window.cost(len(header) + payload_bytes)
        try:
            while not self._window.try_take(amount):
                await self._window.changed()
                self._check_alive()
        except asyncio.CancelledError:
            self._end("send was cancelled")
            raise
        self._post(Kind.DATA, header, payload)
        self._check_alive()

    async def receive(self) -> tuple[bytes, int]:
        self._finish_current()
        while not self._inbox:
            self._check_alive()
            self._arrived.clear()
            await self._arrived.wait()
        message = self._current = self._inbox.popleft()
        if message.payload_bytes == 0:
            self._finish_current()
        return message.header, message.payload_bytes

    async def receive_payload(self, into: Sequence[memoryview]) -> None:
        message = self._current
        wanted = sum(view.nbytes for view in into)
        if message is None and self._lost is not None:
            self._check_alive()
        if wanted != (message.payload_bytes if message else 0):
            raise ValueError(
                f"buffers of {wanted} bytes for a payload of {message.payload_bytes if message else 0}"
            )
        if message is not None:
            scatter(message.payload, into)
            self._finish_current()

    async def close(self) -> None:
        self._end("closed by this side")
        self._inbox.clear()
        self._current = None

    def deliver(self, parts: Sequence[Buffer]) -> None:
        """A message has come from the peer."""
        if self._lost is not None:
            return
        self._silent_ticks = 0
        kind, body = (parts[0][0], bytes(parts[0][1:])) if parts[0] else (0, b"")
        if kind == Kind.DATA and self._opened.is_set():
            self._queue(body, parts[1:])
        elif kind == Kind.CREDIT and len(body) == _CREDIT.size:
            self._window.give(_CREDIT.unpack(body)[0])
        elif kind in (Kind.HELLO, Kind.WELCOME) and not self._opened.is_set():
            self._greeted(body)
        elif kind == Kind.BYE:
            self.lose(body.decode(errors="replace") or "closed by the peer")
        elif kind != Kind.PING:
            self._end(f"message of kind {kind} and {len(body)} bytes is not of this protocol")

    def lose(self, reason: str) -> None:
        """The peer is gone: nothing more will come from it. What has come can still be read."""
        if self._lost is not None:
            return
        self._lost = reason
        self._timer.cancel()
        self._window.shut()
        self._opened.set()
        self._arrived.set()
        self._wire.close()

    def _greeted(self, body: bytes) -> None:
        if len(body) != _GREETING.size or not body.startswith(_MAGIC):
            return self._end("peer does not speak this protocol")
        _, version, window_bytes, max_payload_bytes = _GREETING.unpack(body)
        if version != VERSION:
            return self._end(f"transport version {version} there, {VERSION} here")
        self._window.open(window_bytes)
        self._peer_max_payload = max_payload_bytes
        self._opened.set()

    def _queue(self, header: bytes, payload: Sequence[Buffer]) -> None:
        payload_bytes = sum(len(part) for part in payload)
        self._inbox_cost += cost(len(header) + payload_bytes, self._limits.window_bytes)
        if len(header) > MAX_HEADER_BYTES or payload_bytes > self._limits.max_payload_bytes:
            return self._end(f"message of {len(header)} + {payload_bytes} bytes is over the limit")
        if self._inbox_cost > self._limits.window_bytes:
            return self._end(f"peer sent more than the window of {self._limits.window_bytes} bytes")
        self._inbox.append(Message(header, payload, payload_bytes))
        self._arrived.set()

    def _finish_current(self) -> None:
        message, self._current = self._current, None
        if message is None:
            return
        amount = cost(len(message.header) + message.payload_bytes, self._limits.window_bytes)
        self._inbox_cost -= amount
        self._owed += amount
        if self._owed >= self._limits.window_bytes // 4 and self._lost is None:
            self._post(Kind.CREDIT, _CREDIT.pack(self._owed))
            self._owed = 0

    def _post(self, kind: Kind, body: bytes = b"", payload: Sequence[Buffer] = ()) -> None:
        try:
            self._wire.post([bytes([kind]) + body, *payload])
        except ConnectionError as error:
            self.lose(str(error))

    def _tick(self) -> None:
        # Counts ticks, not time: a stall of our own loop must not be taken for the peer's silence.
        self._silent_ticks += 1
        if self._silent_ticks * self._limits.ping_interval_s > self._limits.silence_timeout_s:
            return self._end(f"peer was silent for {self._limits.silence_timeout_s:g} s")
        self._timer = self._loop.call_later(self._limits.ping_interval_s, self._tick)
        self._post(Kind.PING)

    def _end(self, reason: str) -> None:
        if self._lost is None:
            self._post(Kind.BYE, reason.replace("this side", "the peer").encode())
        self.lose(reason)

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise ConnectionError(f"{self._peer}: {self._lost}")

    def _check_size(self, header_bytes: int, payload_bytes: int) -> None:
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"header of {header_bytes} bytes is over {MAX_HEADER_BYTES}")
        if payload_bytes > self._peer_max_payload:
            raise ValueError(
                f"payload of {payload_bytes} bytes is over the peer's limit of {self._peer_max_payload}"
            )


async def open_within(connection: MailboxConnection, timeout_s: float) -> None:
    """Wait for the peer's answer; the connection is closed when it does not come."""
    try:
        async with asyncio.timeout(timeout_s):
            await connection.opened()
    except TimeoutError:
        raise TimeoutError(f"{connection.peer} did not answer within {timeout_s:g} s") from None
    finally:
        if not connection.is_open:
            await connection.close()
