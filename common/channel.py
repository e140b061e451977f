"""The control channel between proxies and workers: ``common.messages`` over ZeroMQ.

The proxy binds one ROUTER. A worker connects one DEALER to each proxy, and the life of that connection is a
*session*:

    1  connected     the worker sends Status; it may already be told Refused
    2  open          the proxy has answered Welcome; now Generate, Abort, Drain and Ping are delivered
    3  lost          the connection broke, a queue overflowed, or the proxy was silent for too long

Each session has a routing id and a socket of its own, so nothing of one session leaks into the next. Both
sides follow one rule: **when a session is lost, every request of that proxy on that worker is void.** Its
messages arrive whole and in order, or it is lost; nothing is dropped in silence. A message is two frames,
plain MessagePack and its digest: one that was damaged ends the session.

A second Welcome within a session says that the proxy had given the worker up (it was silent) and has it back:
what was before is void too.
"""

import asyncio
import errno
import itertools
import logging
import os
import time
from typing import Any, TypeVar, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from common.inbox import Inbox
from common.messages import (
    MessageError,
    Ping,
    Refused,
    ToProxy,
    ToWorker,
    Welcome,
    decode_to_proxy,
    decode_to_worker,
    encode,
)
from common.seal import is_whole, seal
from common.secret import Secret

PING_INTERVAL_S = 0.5
MAX_QUEUED_MESSAGES = 1000  # per peer and direction, on each side
MAX_MESSAGE_BYTES = 16 << 20
RECONNECT_S = (0.05, 1.0)  # first and longest pause between two sessions

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

Peer = bytes  # routing id: incarnation of the worker and number of the session
AnySocket = TypeVar("AnySocket", bound="zmq.Socket[Any]")

logger = logging.getLogger(__name__)


def _open_socket(
    context: "zmq.Context[AnySocket]", kind: int, address: str, secret: Secret | None
) -> AnySocket:
    """Every option that both ends share."""
    socket = context.socket(kind)
    if secret is not None:
        secret.protect(socket)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = MAX_QUEUED_MESSAGES
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.ipv6 = "[" in address
    socket.handshake_ivl = 3000
    # A half-open connection (cable pulled, packets dropped) closes after three seconds instead of minutes. By
    # means of TCP: libzmq's own heartbeats abort the process when its queue was full for that long.
    socket.tcp_maxrt = 3000
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = 3
    return socket


def _close_socket(socket: "zmq.Socket[Any]", monitor: "zmq.Socket[Any]", flush_s: float = 0.0) -> None:
    if not socket.closed:
        socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=round(1000 * flush_s))


def _sealed(message: ToWorker | ToProxy) -> list[bytes]:
    data = encode(message)
    return [data, seal(data)]


def _opened(frames: list[bytes]) -> bytes:
    """Raises MessageError for anything but a message and its digest."""
    if len(frames) != 2:
        raise MessageError(f"{len(frames)} frames instead of a message and its digest")
    if not is_whole(*frames):
        raise MessageError("a message was damaged on its way")
    return frames[0]


def _event_of(frames: list[bytes]) -> int:
    return int(parse_monitor_message(frames)["event"])


class SessionBroken(ConnectionError):
    """What came from ``peer`` is no message: nothing that it says in this session can be relied on."""

    def __init__(self, peer: Peer, reason: str) -> None:
        super().__init__(f"worker {peer!r}: {reason}")
        self.peer = peer


class Recent:
    """The last thousand things added: strangers may invent ids without end."""

    def __init__(self) -> None:
        self._things: dict[object, None] = {}

    def __contains__(self, thing: object) -> bool:
        return thing in self._things

    def add(self, thing: object) -> None:
        self._things[thing] = None
        if len(self._things) > 1000:
            del self._things[next(iter(self._things))]


class WorkerChannel:
    """The proxy's end: all workers, told apart by ``Peer``. One task receives; anybody sends.

    ``address`` may end in port 0. Raises OSError when it cannot be bound. With a ``secret``, only workers
    that have the same one are heard.
    """

    def __init__(self, address: str, secret: Secret | None = None) -> None:
        self.num_malformed = 0
        self.num_strangers = 0  # connections that were refused
        self._complained = Recent()
        self._gone = Recent()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _open_socket(self._context, zmq.ROUTER, address, secret)
        self._socket.router_mandatory = True
        self._inbox = Inbox(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._events = Inbox(self._monitor)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            text = os.strerror(error.errno or 0)
            raise OSError(error.errno, f"cannot listen on {address}: {text}") from error
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[Peer, ToProxy]:
        """The next message of any worker. Raises SessionBroken when what came is none. A peer that ``send``
        found gone is not heard again, though some of what it said may still be in the queue."""
        while True:
            peer, *frames = await self._inbox.receive()
            if peer in self._gone:
                continue
            try:
                return peer, decode_to_proxy(_opened(frames))
            except MessageError as error:
                self._complain(peer, error)
                raise SessionBroken(peer, str(error)) from error

    def send(self, peer: Peer, message: ToWorker) -> None:
        """Queue ``message``; raises ConnectionError when the peer is gone or does not read. Never waits."""
        try:
            self._socket.send_multipart([peer, *_sealed(message)], zmq.DONTWAIT)
        except zmq.Again:
            raise ConnectionError(f"worker {peer!r} does not read: its queue is full") from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._gone.add(peer)
            raise ConnectionError(f"worker {peer!r} is gone") from None
        finally:
            self._inbox.look()

    async def disconnected(self) -> None:
        """Returns when some connection has ended. Which one shows when sending: a Ping to each peer tells."""
        while _event_of(await self._events.receive()) != zmq.EVENT_DISCONNECTED:
            self.num_strangers += 1
            if self.num_strangers == 1:
                text = "most likely somebody without our secret was refused at %s; others are only counted"
                logger.warning(text, self.address)
        self._inbox.look()  # lets the socket forget the dead connection before the next send

    def close(self) -> None:
        """Safe to repeat."""
        self._inbox.close()
        self._events.close()
        _close_socket(self._socket, self._monitor)
        self._context.destroy(linger=0)

    def _complain(self, peer: Peer, error: MessageError) -> None:
        self.num_malformed += 1
        if peer in self._complained:
            return
        self._complained.add(peer)
        logger.warning("worker %r: %s; later ones are not told of", peer[:80], error)


class ProxyChannel:
    """A worker's end, one per proxy. Connects and reconnects for ever while one task sits in ``receive``."""

    def __init__(
        self,
        address: str,
        incarnation: str,
        silent_after_s: float = 4 * PING_INTERVAL_S,
        secret: Secret | None = None,
    ) -> None:
        self.address = address
        self._secret = secret
        self._was_turned_away = False
        self.num_lost = 0
        self.num_malformed = 0
        self.proxy_incarnation: str | None = None  # None: the session is not open
        self._incarnation = incarnation
        self._silent_after_s = silent_after_s
        self._heard_at = 0.0
        self._broken = ""  # why the session cannot go on
        self._session_numbers = itertools.count()
        self._pause_s = RECONNECT_S[0]
        self._context = zmq.asyncio.Context()
        self._poller = zmq.asyncio.Poller()
        self._monitor: zmq.asyncio.Socket | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._connect()

    async def receive(self) -> ToWorker:
        """The next Generate, Abort, Drain or Refused. Ping and Welcome are dealt with here.

        Raises ConnectionError when an open session is lost, once: all requests of this proxy are void then.
        Call again to go on with the next session.
        """
        while True:
            try:
                message = await self._next_message()
            except ConnectionError:
                await self._reconnect()
                continue
            self._heard_at = time.monotonic()
            if isinstance(message, Welcome):
                self._welcomed(message)
            elif isinstance(message, Refused) or (self.proxy_incarnation and not isinstance(message, Ping)):
                return message

    def send(self, message: ToProxy) -> None:
        """Queue ``message``. Raises ConnectionError when there is no proxy or it does not read; the message
        is dropped then, and so is the session: ``receive`` tells."""
        try:
            if self._socket is None or self._broken:
                raise zmq.Again
            sent = self._socket.send_multipart(_sealed(message), zmq.DONTWAIT)
            cast("asyncio.Future[None]", sent).result()  # it never waits
        except zmq.Again:
            if self.proxy_incarnation is not None and not self._broken:
                self._broken = f"{MAX_QUEUED_MESSAGES} messages wait unread"
            raise ConnectionError(f"proxy {self.address}: {self._broken or 'not connected'}") from None

    def close(self, flush_s: float = 0.0) -> None:
        """What was sent last still reaches a proxy that reads within ``flush_s``, for which this may wait."""
        self._disconnect(flush_s)
        self._context.term()

    def _welcomed(self, message: Welcome) -> None:
        again = self.proxy_incarnation is not None
        self.proxy_incarnation = message.incarnation
        self._pause_s = RECONNECT_S[0]
        if again:
            self.num_lost += 1
            raise ConnectionError(f"proxy {self.address}: had given this worker up")

    async def _next_message(self) -> ToWorker:
        """Raises ConnectionError when the session is over."""
        assert self._socket is not None
        assert self._monitor is not None
        while True:
            ready = dict(await self._poller.poll(self._patience_ms()))
            if self._monitor in ready:
                self._note_event(_event_of(await self._monitor.recv_multipart()))
            elif not ready and self._patience_ms() == 0:
                self._broken = f"silent for {self._silent_after_s} s"
            if self._broken:
                raise ConnectionError(self._broken)
            if self._socket in ready:
                try:
                    return decode_to_worker(_opened(await self._socket.recv_multipart()))
                except MessageError as error:
                    self.num_malformed += 1
                    self._broken = str(error)
                    raise ConnectionError(self._broken) from error

    def _note_event(self, event: int) -> None:
        if event & HANDSHAKE_FAILED and not self._was_turned_away:
            self._was_turned_away = True  # told once, though it will go on trying
            text = "no session with proxy %s: most likely we do not have the same secret, see --secret-file"
            logger.error(text, self.address)
        self._broken = self._broken or "connection lost"

    def _patience_ms(self) -> int | None:
        """Time left to hear from the proxy; None outside an open session, when there is nothing to expect."""
        if self.proxy_incarnation is None:
            return None
        return max(0, round(1000 * (self._heard_at + self._silent_after_s - time.monotonic())))

    async def _reconnect(self) -> None:
        was_open, reason = self.proxy_incarnation is not None, self._broken
        self._disconnect()
        if was_open:
            self._connect()
            self.num_lost += 1
            raise ConnectionError(f"proxy {self.address}: {reason}")
        # Somebody accepts connections there and drops them: without a pause this would spin.
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, RECONNECT_S[1])
        self._connect()

    def _connect(self) -> None:
        socket = _open_socket(self._context, zmq.DEALER, self.address, self._secret)
        socket.immediate = True  # queue nothing for a proxy that is not there
        socket.reconnect_ivl, socket.reconnect_ivl_max = (round(1000 * s) for s in RECONNECT_S)
        socket.routing_id = f"{self._incarnation}.{next(self._session_numbers)}".encode()
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        socket.connect(self.address)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self._socket, self._monitor = socket, monitor

    def _disconnect(self, flush_s: float = 0.0) -> None:
        self.proxy_incarnation, self._broken = None, ""
        socket, monitor = self._socket, self._monitor
        if socket is None or monitor is None:
            return
        self._socket = self._monitor = None
        self._poller.unregister(socket)
        self._poller.unregister(monitor)
        _close_socket(socket, monitor, flush_s)
