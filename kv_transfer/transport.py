"""What a transport is: listen, connect, and ordered messages of a header and a payload over a connection.

A message is a small header (bytes) and a payload (bytes-like buffers, possibly none). The receiver reads the
header first, decides from it where the payload goes, and only then is the payload written there: straight
into cache memory.

Implementations: ``kv_transfer.inproc``, ``kv_transfer.zmq``, ``kv_transfer.ucx``, chosen by the scheme of the
address: ``inproc://name``, ``zmq+tcp://host:port``, ``zmq+ipc://path``, ``ucx://host:port``. All raise
``ConnectionError`` once the peer is gone, at once for pending calls; nothing is lost silently in between: a
message is delivered whole and in order, or the connection is dead.
"""

import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from common.secret import Secret
from kv_transfer.window import MIN_WINDOW_BYTES

if TYPE_CHECKING:  # takes seconds to import
    from torch import Tensor

Buffer = bytes | bytearray | memoryview
MAX_HEADER_BYTES = 1 << 20


def nobody() -> None:
    """Wants to know when a payload is released."""


class AddressError(ValueError):
    """An address that no transport here can serve; the text says why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection. Each side tells the other its own when they meet."""

    max_payload_bytes: int = (
        64 << 20
    )  # larger messages are refused by the sender, and end the connection if they come
    window_bytes: int = 8 << 20  # received and not yet read, or on their way; beyond it the sender waits
    ping_interval_s: float = 0.5
    silence_timeout_s: float = 3.0  # a peer from which nothing came for this long is dead
    secret: Secret | None = None  # which ZeroMQ peers must share; not told to anybody

    def __post_init__(self) -> None:
        if self.window_bytes < MIN_WINDOW_BYTES:
            raise ValueError(f"window_bytes must be at least {MIN_WINDOW_BYTES}, not {self.window_bytes}")
        if not 0 < self.ping_interval_s < self.silence_timeout_s:
            raise ValueError("ping_interval_s must be positive and less than silence_timeout_s")


class Connection(Protocol):
    """One peer. One task sends and one task receives at a time."""

    @property
    def peer(self) -> str:
        """Address of the other side, for logs."""
        ...

    @property
    def on_device(self) -> "DeviceConnection | None":
        """The same connection for payloads in the memory of devices; None where it has no way there."""
        ...

    async def send(
        self,
        header: bytes,
        payload: Sequence[Buffer] = (),
        is_guarded: bool = False,
        released: Callable[[], None] = nobody,
    ) -> None:
        """Send a message; waits while the peer is slow. When this returns the message is on its way, with a
        hash of the payload where ``is_guarded``. ``payload`` must stay as it is until ``released`` is called:
        once, before this returns or later, also where sending fails. Cancelling a send closes the connection:
        half a message must not be followed by another. Raises ``ValueError`` for a message that the peer
        would refuse for its size."""
        ...

    def send_now(self, header: bytes) -> bool:
        """``send`` of a header alone, by those who cannot wait. False when it was not sent: there is no room
        for it, a ``send`` waits for room, or the connection is dead."""
        ...

    async def receive(self) -> tuple[bytes, int]:
        """The next header and the size of its payload in bytes. What came before the peer closed is still
        delivered. Cancelling loses nothing."""
        ...

    async def receive_payload(self, into: Sequence[memoryview]) -> bool:
        """Write the payload of the last header into ``into``, whose sizes add up to its size. False where the
        hash that came along tells that it is not what was sent. When this returns or raises, nothing writes
        into the buffers any more. A payload that is not wanted is skipped by the next ``receive``. Cancelling
        closes the connection."""
        ...

    async def close(self) -> None:
        """End the connection; pending calls on both sides raise ConnectionError. Messages whose ``send`` has
        returned still reach a peer that reads. Safe to repeat."""
        ...


class DeviceConnection(Protocol):
    """What a connection can do besides that reaches into the memory of devices."""

    async def send_tensors(
        self, header: bytes, payload: "Sequence[Tensor]", released: Callable[[], None] = nobody
    ) -> None:
        """As ``send``, each tensor contiguous uint8, anywhere; the peer may take them with
        ``receive_payload``, too."""
        ...

    async def receive_tensors(self, into: "Sequence[Tensor]") -> None:
        """As ``receive_payload``, for what was sent as tensors of these sizes; anything else ends the
        connection."""
        ...


ConnectionHandler = Callable[[Connection], Awaitable[None]]


class Listener(Protocol):
    """Runs the handler in a task of its own for every peer that connects, and closes the connection when it
    ends."""

    @property
    def address(self) -> str:
        """What peers connect to, with the port that was actually bound."""
        ...

    async def close(self) -> None:
        """Stop listening, cancel the handlers and close all accepted connections. The address is free
        afterwards."""
        ...


class Transport(Protocol):
    """What the module of a transport provides."""

    async def listen(
        self, address: str, handler: ConnectionHandler, advertise_host: str, limits: Limits
    ) -> Listener: ...

    async def connect(self, address: str, timeout_s: float, limits: Limits) -> Connection: ...


async def listen(
    address: str, handler: ConnectionHandler, *, advertise_host: str = "", limits: Limits | None = None
) -> Listener:
    """Accept peers at ``address``; port 0 takes any free one. ``advertise_host`` replaces the host in
    ``Listener.address`` where peers know this machine by another name. Raises ``AddressError`` for an address
    that makes no sense here and ``OSError`` for one that cannot be bound."""
    return await transport_of(address).listen(address, handler, advertise_host, limits or Limits())


async def connect(address: str, timeout_s: float, *, limits: Limits | None = None) -> Connection:
    """Raises ``AddressError`` for an address that makes no sense, ``ConnectionError`` when nobody listens
    there and ``TimeoutError`` when somebody does not answer in time."""
    return await transport_of(address).connect(address, timeout_s, limits or Limits())


def available() -> list[str]:
    """The schemes that work with the packages installed here."""
    return ["inproc", "zmq+tcp", "zmq+ipc"] + (["ucx"] if importlib.util.find_spec("ucxx") else [])


def transport_of(address: str) -> Transport:
    """The module behind the scheme of ``address``, imported when first asked for."""
    scheme, separator, place = address.partition("://")
    if not separator or not place:
        raise AddressError(f"{address!r} is not a transfer address such as zmq+tcp://127.0.0.1:7001")
    if scheme == "inproc":
        from kv_transfer import inproc

        return inproc
    if scheme in ("zmq+tcp", "zmq+ipc"):
        from kv_transfer import zmq

        return zmq
    if scheme == "ucx":
        return _ucx(address)
    raise AddressError(f"unknown transport {scheme!r} in {address!r}; known here: {', '.join(available())}")


def _ucx(address: str) -> Transport:
    try:
        from kv_transfer import ucx
    except ImportError as error:
        raise AddressError(
            f"{address!r} needs the package ucxx, which does not import here: {error}"
        ) from error
    return ucx


def host_and_port(address: str) -> tuple[str, int]:
    """Of ``scheme://host:port``; an IPv6 host stands in brackets and is returned without them."""
    host, separator, port = address.partition("://")[2].rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise AddressError(f"{address!r} must end in host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_host(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
