"""``inproc://name``: both sides in one process, possibly in different threads with an event loop each."""

import asyncio
import threading
from collections.abc import Sequence

from kv_transfer.acceptor import Handlers
from kv_transfer.checksum import Digest, copying
from kv_transfer.mailbox import Head, MailboxConnection, hello, open_within
from kv_transfer.memory import Buffer, scatter, size_of
from kv_transfer.transport import Connection, ConnectionHandler, Limits


class Namespace:
    """The names that are listened on. One for the process, as for ports on a machine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, InprocListener] = {}

    def bind(self, address: str, listener: "InprocListener") -> None:
        with self._lock:
            if address in self._listeners:
                raise OSError(f"cannot listen on {address}: it is in use")
            self._listeners[address] = listener

    def find(self, address: str) -> "InprocListener":
        with self._lock:
            if address not in self._listeners:
                raise ConnectionRefusedError(f"nobody listens on {address}")
            return self._listeners[address]

    def free(self, address: str) -> None:
        with self._lock:
            self._listeners.pop(address, None)


_names = Namespace()


class InprocWire:
    """Calls the other side's ``deliver`` in its own loop. The loop's queue of callbacks keeps the order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop  # of the side that this wire belongs to
        self._connection: MailboxConnection | None = None
        self._other: InprocWire | None = None

    def attach(self, connection: MailboxConnection, other: "InprocWire") -> None:
        self._connection, self._other = connection, other

    def post(self, head: Head, payload: Sequence[Buffer] = (), digest: Digest | None = None) -> None:
        if self._other is not None:
            copied = bytearray(size_of(payload))
            scatter(payload, [copied], copying(digest))
            self._other.call([copied, head()] if copied else [head()])

    def read(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self._connection = self._other = None

    def call(self, parts: Sequence[Buffer]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, parts)
        except RuntimeError as error:  # that side's loop is closed
            raise ConnectionResetError("the peer's event loop has ended") from error

    def _deliver(self, parts: Sequence[Buffer]) -> None:
        if self._connection is not None:
            self._connection.deliver(parts)


class InprocListener:
    def __init__(self, address: str, handler: ConnectionHandler, limits: Limits) -> None:
        self.address = address
        self._limits = limits
        self._handlers = Handlers(handler)
        self._loop = asyncio.get_running_loop()

    def meet(self, client: InprocWire, hello: bytes) -> InprocWire:
        """Our end for a new client; called in the client's loop."""
        wire = InprocWire(self._loop)
        try:
            self._loop.call_soon_threadsafe(self._accept, wire, client, hello)
        except RuntimeError as error:
            raise ConnectionRefusedError(f"the event loop of {self.address} has ended") from error
        return wire

    async def close(self) -> None:
        _names.free(self.address)
        await self._handlers.close()

    def _accept(self, wire: InprocWire, client: InprocWire, hello: bytes) -> None:
        connection = MailboxConnection(f"{self.address} client", wire, self._limits)
        wire.attach(connection, client)
        connection.deliver([hello])
        self._handlers.start(connection)


async def listen(
    address: str, handler: ConnectionHandler, advertise_host: str, limits: Limits
) -> InprocListener:
    listener = InprocListener(address, handler, limits)
    _names.bind(address, listener)
    return listener


async def connect(address: str, timeout_s: float, limits: Limits) -> Connection:
    listener = _names.find(address)
    wire = InprocWire(asyncio.get_running_loop())
    connection = MailboxConnection(address, wire, limits)
    wire.attach(connection, listener.meet(wire, hello(limits)))
    await open_within(connection, timeout_s)
    return connection
