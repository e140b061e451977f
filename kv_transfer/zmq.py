"""``zmq+tcp://host:port`` and ``zmq+ipc://path``: a ROUTER socket per listener, a DEALER socket per
connection.

A connection is dead for good when its socket disconnects: the DEALER never reconnects by itself, since what
was under way would be lost unnoticed. The ROUTER learns of it from its monitor, whose events name the file
descriptor that each message also carries. Sockets are read as soon as anything arrives, so no peer waits
behind another; how much may arrive is bounded by the window of ``kv_transfer.mailbox``.

Over ``zmq+ipc`` the payloads of the connecting side go through a ``kv_transfer.ring`` where both sides can
reach it: a second part of HELLO tells where it is, WELCOME has a payload if it was found, and then a message
whose first part is empty has the payload's place in the ring for a second.
"""

import asyncio
import errno
import logging
import os
import socket as sockets
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import cast

import zmq

from common.seal import DIGEST_BYTES
from kv_transfer.acceptor import CLOSE_TIMEOUT_S, Handlers
from kv_transfer.checksum import Digest, copying
from kv_transfer.mailbox import PREFIX_BYTES, Head, Kind, MailboxConnection, headed, hello, open_within
from kv_transfer.memory import Buffer, cut, keep_freed_memory, size_of
from kv_transfer.ring import Ring
from kv_transfer.transport import (
    MAX_HEADER_BYTES,
    ConnectionHandler,
    Limits,
    host_and_port,
    join_host,
)
from kv_transfer.window import MESSAGE_COST
from kv_transfer.zmq_socket import Socket

log = logging.getLogger(__name__)
FRAME_BYTES = 512 << 10  # longest frame of a payload: hashed, then copied out of the processor's cache
GATHER_BYTES = 32 << 10  # shorter buffers are put together
RING_PAYLOAD_BYTES = 64 << 10  # shorter payloads go with their message
RING_FOUND = b"ring"
LINGER_MS = 1000  # for what is still to be sent when a socket closes
HANDSHAKE_MS = 3000
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


async def listen(
    address: str, handler: ConnectionHandler, advertise_host: str, limits: Limits
) -> "RouterListener":
    listener = RouterListener(address, handler, limits)
    listener.start(advertise_host)
    return listener


async def connect(address: str, timeout_s: float, limits: Limits) -> MailboxConnection:
    started = time.monotonic()
    endpoint = await resolved(endpoint_of(address), timeout_s)
    connection = Dealer(address, endpoint, limits).start()
    await open_within(connection, max(0.0, started + timeout_s - time.monotonic()))
    return connection


class Dealer:
    """The wire of the connecting side: a socket of its own."""

    def __init__(self, address: str, endpoint: str, limits: Limits) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._socket = new_socket(zmq.DEALER, self._endpoint, limits, zmq.EVENT_CLOSED | HANDSHAKE_FAILED)
        self._socket.raw.reconnect_ivl = -1
        self._connection = MailboxConnection(address, self, limits)
        self._ring = Ring.create(limits.window_bytes) if endpoint.startswith("ipc://") else None

    def start(self) -> MailboxConnection:
        self._socket.start(self)
        greeting = hello(self._limits)
        try:
            self._socket.raw.connect(self._endpoint)
            if self._ring is None:
                self._send((), lambda: greeting)
            else:
                where = self._ring.where
                self._send([greeting], lambda: where)
        except zmq.ZMQError as error:
            self._connection.lose(error.strerror or "no such place")
        except ConnectionError as error:
            self._socket.read_events()  # why, if that is known
            self._connection.lose(str(error))
        return self._connection

    def post(self, head: Head, payload: Sequence[Buffer] = (), digest: Digest | None = None) -> None:
        fits = RING_PAYLOAD_BYTES <= size_of(payload) <= self._limits.window_bytes // 2
        parts: Iterable[Buffer]
        if fits and self._ring is not None:  # no payload goes out before WELCOME
            parts = [b"", self._ring.write(payload, copying(digest))]
        else:
            parts = frames_of(payload, digest)
        self._send(parts, head)

    def _send(self, parts: Iterable[Buffer], last: Head) -> None:
        try:
            self._socket.post(parts, last)
        except zmq.ZMQError as error:
            self._socket.read()  # why, if the peer has said so
            raise ConnectionResetError("the peer is gone") from error

    def read(self) -> None:
        self._socket.read()

    def close(self) -> None:
        if not self._connection.was_open:
            self._socket.raw.linger = 0  # there is nobody to take it
        self._socket.close()
        if self._ring is not None:
            self._ring.was_opened()
            self._ring = None

    def arrived(self, frames: Sequence[zmq.Frame]) -> None:
        if self._ring is not None and not self._connection.was_open:
            self._ring.was_opened()
            if len(frames) < 2 or frames[0].bytes != RING_FOUND:
                self._ring = None
        self._connection.deliver([frame.buffer for frame in frames])

    def happened(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._socket.read()  # what came before the end
            self._connection.lose("the peer is gone")
        elif event == zmq.EVENT_CLOSED:
            self._connection.lose("nobody listens there")
        else:
            self._connection.lose("the peer has another secret than we have, or does not speak ZeroMQ")


class Route:
    """The wire of an accepted connection: the routing id that the ROUTER gave to its peer."""

    def __init__(
        self, listener: "RouterListener", routing_id: bytes, descriptor: int, name: str, limits: Limits
    ) -> None:
        self._listener = listener
        self._routing_id = routing_id
        self._descriptor = descriptor
        self._ring: Ring | None = None
        self._has_answered = False
        self.connection = MailboxConnection(name, self, limits)

    def post(self, head: Head, payload: Sequence[Buffer] = (), digest: Digest | None = None) -> None:
        if self._ring is not None and not self._has_answered:  # it answers with WELCOME
            payload = [RING_FOUND]
        self._has_answered = True
        self._listener.post(self._routing_id, head, payload, digest)

    def open(self, hello: Sequence[Buffer]) -> None:
        self._ring = Ring.open(hello[1]) if len(hello) > 1 else None
        self.connection.deliver(hello[:1])

    def arrived(self, parts: Sequence[Buffer]) -> None:
        if len(parts) == 3 and self._ring is not None and not parts[0]:
            place = self._ring.read(parts[1])
            if place is None:
                return self.connection.refuse("a payload is said to lie outside of the ring")
            parts = [place, parts[2]]
        self.connection.deliver(parts)

    def read(self) -> None:
        self._listener.read()

    def close(self) -> None:
        self._ring = None  # its memory goes when the last payload in it was read
        self._listener.forget(self._routing_id, self._descriptor)


class RouterListener:
    def __init__(self, address: str, handler: ConnectionHandler, limits: Limits) -> None:
        self._address = address
        self._limits = limits
        self._handlers = Handlers(handler)
        self._routes: dict[bytes, Route] = {}  # by routing id
        self._routing_ids: dict[int, bytes] = {}  # by file descriptor
        self._unbound = asyncio.Event()
        self._endpoint = endpoint_of(address)
        self._socket = new_socket(zmq.ROUTER, self._endpoint, limits, zmq.EVENT_CLOSED)
        self._socket.raw.router_mandatory = True

    @property
    def address(self) -> str:
        return self._address

    def start(self, advertise_host: str) -> None:
        try:
            refuse_path_in_use(self._endpoint)
            self._socket.raw.bind(self._endpoint)
        except (zmq.ZMQError, OSError) as error:
            self._socket.close()
            reason = os.strerror(error.errno or errno.EINVAL)
            raise OSError(error.errno, f"cannot listen on {self._address}: {reason}") from error
        self._endpoint = cast(bytes, self._socket.raw.last_endpoint).decode()
        self._address = advertised(self._address, self._endpoint, advertise_host)
        self._socket.start(self)

    def post(
        self,
        routing_id: bytes,
        head: Head,
        payload: Sequence[Buffer] = (),
        digest: Digest | None = None,
    ) -> None:
        try:
            self._socket.post(chain([routing_id], frames_of(payload, digest)), head)
        except zmq.ZMQError as error:
            raise ConnectionResetError("the peer is gone") from error

    def read(self) -> None:
        self._socket.read()

    def forget(self, routing_id: bytes, descriptor: int) -> None:
        del self._routes[routing_id]
        if self._routing_ids.get(descriptor) == routing_id:
            del self._routing_ids[descriptor]

    async def close(self) -> None:
        if self._socket.raw.closed:
            return
        self._socket.raw.unbind(self._endpoint)
        await self._handlers.close()
        for route in list(self._routes.values()):
            route.connection.lose("the listener was closed")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._unbound.wait()
        except TimeoutError:
            log.error("%s is still bound %g s after it was closed", self._address, CLOSE_TIMEOUT_S)
        finally:
            self._socket.close()

    def arrived(self, frames: Sequence[zmq.Frame]) -> None:
        routing_id, parts = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        if not parts:
            return
        if routing_id in self._routes:
            self._routes[routing_id].arrived(parts)
        elif parts[0][:1] == bytes([Kind.HELLO]) and not self._unbound.is_set():
            self._accept(routing_id, frames[1], parts)
        elif parts[-1][:1] != bytes([Kind.BYE]):
            self._turn_away(routing_id)

    def happened(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_CLOSED:
            self._unbound.set()
        elif descriptor in self._routing_ids:
            self._socket.read()  # what came before the end
            route = self._routes.get(self._routing_ids.get(descriptor, b""))
            if route is not None:
                route.connection.lose("the peer is gone")

    def _accept(self, routing_id: bytes, hello: zmq.Frame, parts: Sequence[Buffer]) -> None:
        descriptor, host = hello.get(zmq.SRCFD), hello.get("Peer-Address") or "local"
        self._socket.read_events()  # the descriptor may have been another peer's, whose end was not read yet
        route = Route(self, routing_id, descriptor, f"{host} on {self._address}", self._limits)
        self._routes[routing_id] = route
        self._routing_ids[descriptor] = routing_id
        route.open(parts)
        if route.connection.was_open:
            self._handlers.start(route.connection)

    def _turn_away(self, routing_id: bytes) -> None:
        """A peer that was silent for too long and has come back, or one that does not know how to begin."""
        try:
            self.post(routing_id, lambda: headed(Kind.BYE, b"the connection had ended before"))
        except ConnectionError:
            log.debug("a peer without a connection left")


def frames_of(payload: Sequence[Buffer], digest: Digest | None) -> Iterator[Buffer]:
    for frame in cut(payload, FRAME_BYTES, GATHER_BYTES):
        if digest is not None:
            digest.update(memoryview(frame))
        yield frame


def new_socket(kind: zmq.SocketType, endpoint: str, limits: Limits, events: int) -> Socket:
    """Raises ``ConnectionError`` when this process may open no more sockets."""
    keep_freed_memory()
    try:
        socket = Socket(kind, zmq.EVENT_DISCONNECTED | events)
    except zmq.ZMQError as error:
        raise ConnectionError(f"no socket for {endpoint}: {error.strerror}") from error
    raw = socket.raw
    if limits.secret is not None:
        limits.secret.protect(raw)
    raw.linger = LINGER_MS
    raw.ipv6 = "[" in endpoint
    raw.sndhwm = raw.rcvhwm = (
        16 + limits.window_bytes // MESSAGE_COST
    )  # never reached by a peer that minds its window
    raw.maxmsgsize = max(FRAME_BYTES, 1 + MAX_HEADER_BYTES + PREFIX_BYTES + DIGEST_BYTES)
    raw.handshake_ivl = HANDSHAKE_MS
    # Frees the sockets of hosts that vanished; their connections are long dead by then.
    raw.setsockopt(zmq.TCP_MAXRT, int(limits.silence_timeout_s * 2000))
    return socket


async def resolved(endpoint: str, timeout_s: float) -> str:
    """The same endpoint with a number for the host. ZeroMQ would look the name up in the thread that moves
    the data of all connections, and keep them waiting."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, port = host_and_port(endpoint)
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=sockets.SOCK_STREAM)
    except sockets.gaierror as error:
        raise ConnectionError(f"{host}: {error.strerror}") from error
    except TimeoutError:
        raise TimeoutError(f"{host} was not resolved within {timeout_s:g} s") from None
    return f"tcp://{join_host(str(found[0][4][0]), port)}"


def endpoint_of(address: str) -> str:
    scheme, _, place = address.partition("://")
    return f"ipc://{place}" if scheme == "zmq+ipc" else f"tcp://{join_host(*host_and_port(address))}"


def advertised(address: str, endpoint: str, advertise_host: str) -> str:
    scheme = address.partition("://")[0]
    if scheme == "zmq+ipc":
        return address
    host, port = host_and_port(endpoint)
    return f"{scheme}://{join_host(advertise_host or host, port)}"


def refuse_path_in_use(endpoint: str) -> None:
    """ZeroMQ would take the path of a living listener over; that of a dead one it may."""
    if not endpoint.startswith("ipc://"):
        return
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(endpoint.removeprefix("ipc://")) == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
