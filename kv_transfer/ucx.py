"""``ucx://host:port``: payloads by UCX, everything else by ZeroMQ at that host and port.

UCX moves a payload from the memory of one process into that of another, by RDMA, shared memory or whatever it
finds. What it is not good at comes from ``kv_transfer.zmq``: listening on one address of the machine only,
noticing at once that a peer has died, strangers at the door. A message is a ZeroMQ message that names the
sizes of its pieces, and the pieces, sent with the tag that the receiver gave out when the two sides met:

    send     ZeroMQ: header, sizes of the pieces      UCX: offers to fetch each piece, then their hash
    receive  reads the header
    receive_payload                                   UCX: fetches each piece into its place, then the hash

Each piece is hashed just before it is offered and just after it was fetched, while it is in the processor's
cache. Some messages may be on their way at once, so that neither side waits while the other one hashes.
"""

import asyncio
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor
from xxhash import xxh3_64_intdigest

from common.hosts import is_loopback
from kv_transfer import zmq
from kv_transfer.checksum import HASH_BYTES, digest_for
from kv_transfer.mailbox import MailboxConnection
from kv_transfer.memory import Buffer, cut, flat, scatter, size_of
from kv_transfer.transport import (
    Connection,
    ConnectionHandler,
    Limits,
    Listener,
    host_and_port,
    nobody,
)
from kv_transfer.ucx_engine import Endpoint, Engine, Operation, quiet

PIECE_BYTES = 512 << 10  # stays in a core's own cache between being hashed and being moved
GATHER_BYTES = 32 << 10  # shorter buffers are put together
INLINE_BYTES = 256 << 10  # a payload up to this size costs less by ZeroMQ
MOST_UNDER_WAY = 3  # messages
MEET_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0  # for what is still to be fetched when we close
_PLACE = struct.Struct(">QQ")  # tag, checksum of the address; the address follows
_PIECES = struct.Struct(">?H")  # whether their hash comes behind them, their number; sizes and header follow
# One UCX context per event loop and reach, since each costs tens of milliseconds and of descriptors.
_engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, Engine]] = (
    weakref.WeakKeyDictionary()
)


async def listen(address: str, handler: ConnectionHandler, advertise_host: str, limits: Limits) -> Listener:
    engine = engine_for(address)

    async def meet_and_handle(connection: Connection) -> None:
        assert isinstance(connection, MailboxConnection)
        try:
            async with asyncio.timeout(MEET_TIMEOUT_S):
                met = await meet(connection, engine, limits)
        except TimeoutError:
            return connection.refuse(f"no UCX address came within {MEET_TIMEOUT_S:g} s")
        try:
            await handler(met)
        finally:
            await met.close()

    return await zmq.listen(address, meet_and_handle, advertise_host, limits)


async def connect(address: str, timeout_s: float, limits: Limits) -> Connection:
    engine = engine_for(address)
    started = time.monotonic()
    connection = await zmq.connect(address, timeout_s, limits)
    try:
        async with asyncio.timeout(max(0.0, started + timeout_s - time.monotonic())):
            return await meet(connection, engine, limits)
    except TimeoutError:
        await connection.close()
        raise TimeoutError(f"{address} did not answer within {timeout_s:g} s") from None
    except BaseException:
        await connection.close()
        raise


async def meet(connection: MailboxConnection, engine: Engine, limits: Limits) -> "UcxConnection":
    """Tell each other where our UCX workers are, and which tag payloads to us are to have. UCX ends the
    process when it is given an address that it cannot read, so versions and a checksum are compared before.
    It takes more to keep a hostile peer out: UCX is for hosts that trust each other."""
    tag = int.from_bytes(os.urandom(8))
    hello = f"ucx {engine.version}".encode()
    await connection.send(hello, [_PLACE.pack(tag, xxh3_64_intdigest(engine.address)), engine.address])
    header, size = await connection.receive()
    answer = bytearray(size)
    await connection.receive_payload([memoryview(answer)])
    if (reason := misfit(hello, header, answer)) is not None:
        connection.refuse(reason)
        connection.check_alive()
    endpoint = engine.endpoint(bytes(answer[_PLACE.size :]))
    return UcxConnection(connection, endpoint, _PLACE.unpack_from(answer)[0], tag, limits)


def misfit(hello: bytes, header: bytes, place: bytearray) -> str | None:
    """What keeps us from using the answer to ``hello``."""
    if not header.startswith(b"ucx ") or len(place) <= _PLACE.size:
        return "the peer does not speak UCX"
    if header != hello:
        return f"the sides have different versions of UCX: {header[4:20]!r} and {hello[4:]!r}"
    if xxh3_64_intdigest(place[_PLACE.size :]) != _PLACE.unpack_from(place)[1]:
        return "the peer's UCX address was altered on its way"
    return None


class Announced(NamedTuple):
    """The payload of a message whose header was read. It is here already, or waits with the sender in
    pieces."""

    payload_bytes: int
    piece_sizes: Sequence[int]
    is_guarded: bool  # the hash of the pieces waits behind them

    @property
    def sizes(self) -> list[int]:
        """Of all that waits."""
        return [*self.piece_sizes, HASH_BYTES] if self.is_guarded else list(self.piece_sizes)


NOTHING = Announced(0, (), False)


class UcxConnection:
    def __init__(
        self, inner: MailboxConnection, endpoint: Endpoint, send_tag: int, receive_tag: int, limits: Limits
    ) -> None:
        self.peer = inner.peer
        self._inner = inner
        self._endpoint = endpoint
        self._send_tag = send_tag
        self._receive_tag = receive_tag
        self._limits = limits
        self._current = NOTHING
        self._under_way: set[asyncio.Task[None]] = set()
        self._skipped: list[Operation] = []
        inner.ended.add_done_callback(lambda _: endpoint.close())

    async def send(
        self,
        header: bytes,
        payload: Sequence[Buffer] = (),
        is_guarded: bool = False,
        released: Callable[[], None] = nobody,
    ) -> None:
        payload_bytes = size_of(payload)
        if payload_bytes > INLINE_BYTES:
            # However scattered the payload is, its pieces are few enough to be counted.
            pieces = cut(payload, PIECE_BYTES, max(GATHER_BYTES, payload_bytes // 4096))
            return await self._send_pieces(header, pieces, is_guarded, released)
        try:
            self._inner.check_size(len(header), payload_bytes)
            await self._inner.send_unchecked(_PIECES.pack(False, 0) + header, payload, is_guarded)
        finally:
            released()

    @property
    def on_device(self) -> "UcxConnection":
        return self

    async def send_tensors(
        self, header: bytes, payload: Sequence[Tensor], released: Callable[[], None] = nobody
    ) -> None:
        await self._send_pieces(header, payload, False, released)

    async def _send_pieces(
        self,
        header: bytes,
        payload: Iterable[Buffer | Tensor],
        is_guarded: bool,
        released: Callable[[], None],
    ) -> None:
        try:
            pieces = list(payload)
            sizes = [len(piece) for piece in pieces]
            self._inner.check_size(len(header), sum(sizes))
            digest = digest_for(sum(sizes)) if is_guarded else None
            await self._room()
            announced = _PIECES.pack(is_guarded, len(sizes)) + struct.pack(f">{len(sizes)}I", *sizes)
            await self._inner.send_unchecked(announced + header)
        except BaseException:
            released()
            raise
        operations: list[Operation] = []
        try:
            for piece in pieces:
                if digest is not None:
                    assert not isinstance(piece, Tensor)
                    digest.update(memoryview(piece))
                operations.append(self._endpoint.send(piece, self._send_tag))
                self._endpoint.progress()
            if digest is not None:
                operations.append(self._endpoint.send(digest.digest(), self._send_tag))
        except BaseException:
            self._inner.end("a send has failed here", "the peer failed to send")
            raise
        finally:
            task = asyncio.create_task(self._sent(operations))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            task.add_done_callback(lambda _: released())

    async def _room(self) -> None:
        """Wait until a further message may be on its way."""
        try:
            while len(self._under_way) >= MOST_UNDER_WAY:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._inner.end("a send was cancelled here", "the peer cancelled a send")
            raise

    async def _sent(self, operations: Sequence[Operation]) -> None:
        """That it fails shows in the end of the connection."""
        with suppress(ConnectionError):
            await self._finish(operations)

    def send_now(self, header: bytes) -> bool:
        self._inner.check_size(len(header), 0)
        return self._inner.send_now(_PIECES.pack(False, 0) + header)

    async def receive(self) -> tuple[bytes, int]:
        await self._skip()
        content, inline_bytes = await self._inner.receive()
        try:
            is_guarded, count = _PIECES.unpack_from(content)
            sizes = struct.unpack_from(f">{count}I", content, _PIECES.size)
        except struct.error:
            is_guarded, sizes = False, (0,)
        is_odd = 0 in sizes or (sizes and inline_bytes) or (is_guarded and not sizes)
        if is_odd or sum(sizes) > self._limits.max_payload_bytes:
            self._inner.refuse("a message with pieces of impossible sizes")
            self._inner.check_alive()
        self._current = Announced(sum(sizes) or inline_bytes, sizes, is_guarded)
        return content[_PIECES.size + 4 * len(sizes) :], self._current.payload_bytes

    async def receive_payload(self, into: Sequence[memoryview]) -> bool:
        if not self._current.piece_sizes:
            return await self._inner.receive_payload(into)
        if size_of(into) != self._current.payload_bytes:
            raise ValueError(
                f"buffers of {size_of(into)} bytes for a payload of {self._current.payload_bytes} bytes"
            )
        payload_bytes, sizes, is_guarded = self._begin()
        places = list(fit(sizes, into))
        digest = digest_for(payload_bytes) if is_guarded else None
        told = memoryview(bytearray(HASH_BYTES if is_guarded else 0))
        landings = [place.landing for place in places] + [told] * is_guarded
        operations = [self._endpoint.receive(landing, self._receive_tag) for landing in landings]

        def landed(number: int) -> None:
            if number < len(places):
                landing, parts = places[number]
                if digest is not None:
                    digest.update(landing)
                if parts:
                    scatter([landing], parts)

        await self._finish(operations, landed)
        return digest is None or digest.digest() == told

    async def receive_tensors(self, into: Sequence[Tensor]) -> None:
        if self._current.sizes != [tensor.nbytes for tensor in into]:
            self._inner.refuse("blocks in pieces that are no blocks")
        self._begin()
        await self._finish([self._endpoint.receive(tensor, self._receive_tag) for tensor in into])

    def _begin(self) -> Announced:
        """What is to be fetched now. The peer may have left while this process was held up: what it said last
        is read first, for nothing ends the fetching of what a peer no longer offers."""
        announced, self._current = self._current, NOTHING
        self._inner.read()
        self._inner.check_alive()
        return announced

    async def close(self) -> None:
        try:
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=CLOSE_TIMEOUT_S)
        finally:
            await self._inner.close()
            self._current = NOTHING
            self._endpoint.close()
            await quiet(self._skipped)
            if self._under_way:
                await asyncio.wait(self._under_way)

    async def _skip(self) -> None:
        """Fetch a payload that nobody wants. Cancelled, it goes on with the next call."""
        if sizes := self._current.sizes:
            self._begin()
            nowhere = memoryview(bytearray(max(sizes)))
            self._skipped = [self._endpoint.receive(nowhere[:size], self._receive_tag) for size in sizes]
        if not self._skipped:
            return
        await asyncio.wait([operation.done for operation in self._skipped])
        if any(operation.done.exception() is not None for operation in self._skipped):
            self._inner.refuse("UCX has failed")
            self._inner.check_alive()
        self._skipped = []

    async def _finish(
        self, operations: Sequence[Operation], finished: Callable[[int], None] = lambda number: None
    ) -> None:
        """Wait for them, one after the other; the end of the connection ends them, too. When one fails or the
        task is cancelled, the connection is dead, and nothing touches their buffers any more."""
        try:
            for number, (_, _, done) in enumerate(operations):
                if not done.done():
                    await asyncio.wait([done])
                done.result()
                finished(number)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._inner.end("a transfer was cancelled here", "the peer cancelled a transfer")
            self._inner.refuse("UCX has failed")
            self._endpoint.close()
            await quiet(operations)
            if isinstance(error, ConnectionError):
                self._inner.check_alive()
            raise


class Place(NamedTuple):
    """Where a piece is received: in its place, or if that is in several ``parts``, where it waits to be
    copied."""

    landing: memoryview
    parts: list[memoryview]


def fit(sizes: Sequence[int], into: Sequence[memoryview]) -> Iterator[Place]:
    """Places for pieces of these sizes in the buffers ``into``, which hold as much in total."""
    views = flat(into)
    view = next(views)
    for size in sizes:
        parts = []
        missing = size
        while missing:
            view = view if view.nbytes else next(views)
            part, view = view[:missing], view[missing:]
            parts.append(part)
            missing -= part.nbytes
        yield Place(parts[0], []) if len(parts) == 1 else Place(memoryview(bytearray(size)), parts)


def engine_for(address: str) -> Engine:
    """The running loop's UCX for addresses of this machine, or of others."""
    host, _ = host_and_port(address)
    reach = is_loopback(host)
    engines = _engines.setdefault(asyncio.get_running_loop(), {})
    if reach not in engines:
        engines[reach] = Engine(is_local=reach)
    return engines[reach]
