"""A connection over anything that carries whole messages in order, as ZeroMQ sockets and a queue both do.

What such carriers lack is added here, the same for all of them:

1. HELLO from the side that connects, WELCOME back: both know each other's limits.
2. DATA, or GUARDED data, while the peer has room. CREDIT returns room as messages are read, so neither side
   ever holds more than a window for a peer that reads slowly.
3. PING on a timer. A peer that was silent for too long is dead, however its socket looks.
4. BYE with the reason ends the connection, after everything sent before it.

The last part of each message is one byte of kind, a hash of the payload where that is guarded, the header,
and a digest of these. Parts before it are the payload: it comes first, to be hashed as it goes out.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from common.seal import DIGEST_BYTES, is_whole, seal
from kv_transfer.checksum import HASH_BYTES, Digest, copying, digest_for
from kv_transfer.memory import Buffer, scatter, size_of
from kv_transfer.transport import MAX_HEADER_BYTES, Limits, nobody
from kv_transfer.window import MIN_WINDOW_BYTES, Window

VERSION = 3
PREFIX_BYTES = 64 << 10
_GREETING = struct.Struct(">5sBQQ")  # magic, version, window, largest payload
_CREDIT = struct.Struct(">Q")
_MAGIC = b"baton"
Head = Callable[[], bytes]  # the last part of a message, asked for when the others are out


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    DATA = 3
    CREDIT = 4
    PING = 5
    BYE = 6
    GUARDED = 7


def headed(kind: Kind, body: bytes = b"") -> bytes:
    head = bytes([kind]) + body
    return head + seal(head)


def greeting(limits: Limits) -> bytes:
    return _GREETING.pack(_MAGIC, VERSION, limits.window_bytes, limits.max_payload_bytes)


def hello(limits: Limits) -> bytes:
    """The first message of a connection."""
    return headed(Kind.HELLO, greeting(limits))


class Wire(Protocol):
    """Carries the messages of one connection to its peer."""

    def post(self, head: Head, payload: Sequence[Buffer] = (), digest: Digest | None = None) -> None:
        """Take a message without waiting and without keeping ``payload``, which ``digest`` is shown. Raises
        ``ConnectionError``."""
        ...

    def read(self) -> None:
        """Deliver what has come already."""
        ...

    def close(self) -> None:
        """Drop the peer once what was posted is out. Called once."""
        ...


class Message(NamedTuple):
    header: bytes
    payload: Sequence[Buffer]
    payload_bytes: int
    cost: int
    hash: bytes  # of the payload; empty where it is not guarded


class MailboxConnection:
    """The ``Connection`` of carriers that move whole messages. The carrier calls ``deliver`` and ``lose``."""

    def __init__(self, peer: str, wire: Wire, limits: Limits) -> None:
        self.peer = peer
        self._wire = wire
        self._limits = limits
        self._window = Window()
        self._max_payload_bytes = 0  # that the peer takes
        self._opened = asyncio.Event()
        self._arrived = asyncio.Event()
        self._inbox: deque[Message] = deque()
        self._current: Message | None = None  # header read, payload not yet
        self._held = 0  # cost of what was received and not read
        self._owed = 0  # cost of what was read and not yet returned as credit
        self._lost: str | None = None
        self.ended: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # when it is lost or closed
        self._silent_ticks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limits.ping_interval_s, self._tick)

    @property
    def on_device(self) -> None:
        """Such carriers know main memory alone."""

    @property
    def was_open(self) -> bool:
        """Whether the peer has ever answered."""
        return self._window.size > 0

    async def opened(self) -> None:
        """Wait until the peer has answered. Raises ``ConnectionError`` when it is lost before."""
        await self._opened.wait()
        if not self.was_open:
            self.check_alive()

    async def send(
        self,
        header: bytes,
        payload: Sequence[Buffer] = (),
        is_guarded: bool = False,
        released: Callable[[], None] = nobody,
    ) -> None:
        try:
            self.check_size(len(header), size_of(payload))
            await self.send_unchecked(header, payload, is_guarded)
        finally:
            released()

    async def send_unchecked(
        self, header: bytes, payload: Sequence[Buffer] = (), is_guarded: bool = False
    ) -> None:
        """For transports that add up to ``PREFIX_BYTES`` to a header."""
        self.check_alive()
        payload_bytes = size_of(payload)
        try:
            await self._window.take(self._window.cost(len(header) + payload_bytes))
        except asyncio.CancelledError:
            self.end("a send was cancelled here", "the peer cancelled a send")
            raise
        self.check_alive()
        if is_guarded:
            digest = digest_for(payload_bytes)
            self._post(Kind.GUARDED, header, payload, digest)
        else:
            self._post(Kind.DATA, header, payload)
        self.check_alive()

    def send_now(self, header: bytes) -> bool:
        self.check_size(len(header), 0)
        if not self._window.try_take(self._window.cost(len(header))):
            return False
        self._post(Kind.DATA, header)
        return self._lost is None

    async def receive(self) -> tuple[bytes, int]:
        self._finish_current()
        while not self._inbox:
            self.check_alive()
            self._arrived.clear()
            await self._arrived.wait()
        message = self._current = self._inbox.popleft()
        if message.payload_bytes == 0:
            self._finish_current()
        return message.header, message.payload_bytes

    async def receive_payload(self, into: Sequence[memoryview]) -> bool:
        if self._current is None:
            self.check_alive()
        message = self._current
        expected, given = message.payload_bytes if message else 0, size_of(into)
        if given != expected:
            raise ValueError(f"buffers of {given} bytes for a payload of {expected} bytes")
        if message is None:
            return True
        digest = digest_for(expected) if message.hash else None
        scatter(message.payload, into, copying(digest))
        self._finish_current()
        return digest is None or digest.digest() == message.hash

    async def close(self) -> None:
        self.end("closed by this side", "closed by the peer")
        self._inbox.clear()
        self._current = None

    def deliver(self, parts: Sequence[Buffer]) -> None:
        """A message has come from the peer."""
        *payload, last = parts
        if self._lost is not None or not last:
            return
        self._silent_ticks = 0
        head, digest = last[:-DIGEST_BYTES], last[-DIGEST_BYTES:]
        if not head or not is_whole(head, digest):
            return self.refuse("a message was damaged on its way, or is not of this protocol")
        kind, body = head[0], bytes(head[1:])
        if kind == Kind.DATA and self._opened.is_set():
            self._queue(body, payload, b"")
        elif kind == Kind.GUARDED and self._opened.is_set() and len(body) >= HASH_BYTES:
            self._queue(body[HASH_BYTES:], payload, body[:HASH_BYTES])
        elif kind == Kind.CREDIT and len(body) == _CREDIT.size:
            self._window.give(_CREDIT.unpack(body)[0])
        elif kind in (Kind.HELLO, Kind.WELCOME) and not self._opened.is_set():
            self._greeted(Kind(kind), body)
        elif kind == Kind.BYE:
            self.lose(body.decode(errors="replace"))
        elif kind != Kind.PING:
            self.refuse(f"a message of kind {kind} and {len(body)} bytes is not of this protocol")

    def read(self) -> None:
        """Take notice of what has come, at once."""
        if self._lost is None:
            self._wire.read()

    def lose(self, reason: str) -> None:
        """The peer is gone: nothing more will come from it. What has come can still be read."""
        if self._lost is not None:
            return
        self._lost = reason
        self.ended.set_result(None)
        self._timer.cancel()
        self._window.shut()
        self._opened.set()
        self._arrived.set()
        self._wire.close()

    def end(self, reason_here: str, reason_there: str) -> None:
        """Close the connection, telling the peer why."""
        if self._lost is None:
            self._post(Kind.BYE, reason_there.encode())
        self.lose(reason_here)

    def refuse(self, reason: str) -> None:
        """The peer broke the protocol."""
        self.end(reason, reason)

    def check_alive(self) -> None:
        if self._lost is not None:
            raise ConnectionError(f"{self.peer}: {self._lost}")

    def check_size(self, header_bytes: int, payload_bytes: int) -> None:
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {header_bytes} bytes is over {MAX_HEADER_BYTES}")
        if payload_bytes > self._max_payload_bytes:
            raise ValueError(f"a payload of {payload_bytes} bytes is over {self._max_payload_bytes}")

    def _greeted(self, kind: Kind, body: bytes) -> None:
        if len(body) != _GREETING.size or not body.startswith(_MAGIC):
            return self.refuse("the first message is not a greeting of this protocol")
        _, version, window_bytes, max_payload_bytes = _GREETING.unpack(body)
        if version != VERSION:
            return self.refuse(f"the sides speak versions {version} and {VERSION} of the transport")
        if window_bytes < MIN_WINDOW_BYTES:
            return self.refuse(f"a window of {window_bytes} bytes is too small")
        # The same window both ways, so that both sides agree on what a message costs.
        self._window.open(min(window_bytes, self._limits.window_bytes))
        self._max_payload_bytes = max_payload_bytes
        self._opened.set()
        if kind == Kind.HELLO:
            self._post(Kind.WELCOME, greeting(self._limits))

    def _queue(self, header: bytes, payload: Sequence[Buffer], payload_hash: bytes) -> None:
        payload_bytes = size_of(payload)
        if len(header) > MAX_HEADER_BYTES + PREFIX_BYTES or payload_bytes > self._limits.max_payload_bytes:
            return self.refuse(f"a message of {len(header)} + {payload_bytes} bytes is over the limit")
        amount = self._window.cost(len(header) + payload_bytes)
        self._held += amount
        if self._held + self._owed > self._window.size:
            return self.refuse(f"more was sent than the window of {self._window.size} bytes")
        self._inbox.append(Message(header, payload, payload_bytes, amount, payload_hash))
        self._arrived.set()

    def _finish_current(self) -> None:
        message, self._current = self._current, None
        if message is None:
            return
        self._held -= message.cost
        self._owed += message.cost
        if self._owed >= self._window.size // 4 and self._lost is None:
            self._post(Kind.CREDIT, _CREDIT.pack(self._owed))
            self._owed = 0

    def _post(
        self, kind: Kind, body: bytes = b"", payload: Sequence[Buffer] = (), digest: Digest | None = None
    ) -> None:
        def head() -> bytes:
            return headed(kind, body if digest is None else digest.digest() + body)

        try:
            self._wire.post(head, payload, digest)
        except ConnectionError as error:
            self.lose(str(error))

    def _tick(self) -> None:
        # Counts ticks, not time: a stall of our own loop must not be taken for the peer's silence.
        self._silent_ticks += 1
        if self._silent_ticks * self._limits.ping_interval_s > self._limits.silence_timeout_s:
            silence = f"was silent for {self._limits.silence_timeout_s:g} s"
            return self.end(f"the peer {silence}", f"this side {silence}")
        self._timer = self._loop.call_later(self._limits.ping_interval_s, self._tick)
        self._post(Kind.PING)


async def open_within(connection: MailboxConnection, timeout_s: float) -> None:
    """Wait for the peer's answer; the connection is closed when it does not come."""
    try:
        async with asyncio.timeout(timeout_s):
            await connection.opened()
    except BaseException as error:
        await connection.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"{connection.peer} did not answer within {timeout_s:g} s") from None
        raise
