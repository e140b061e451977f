"""What a transport is: listen, connect, and ordered messages of a header and a payload over a connection.

A message is a small header (bytes) and a payload (bytes-like buffers, possibly none). The receiver reads the header
first, decides from it where the payload goes, and only then is the payload written there: straight into cache memory.

Implementations: ``kv_transfer.inproc``, ``kv_transfer.zmq``, ``kv_transfer.ucx``, chosen by the scheme of the address.
All raise ``ConnectionError`` once the peer is gone, at once for pending calls; nothing is lost silently in between:
a message is delivered whole and in order, or the connection is dead.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Connection(Protocol):
    """One peer. One task sends and one task receives at a time."""

    @property
    def peer(self) -> str:
        """Address of the other side, for logs."""
        ...

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send a message; waits while the peer is slow. When it returns, ``payload`` may be overwritten.
        Cancelling a send closes the connection: half a message must not be followed by another."""
        ...

    async def receive(self) -> tuple[bytes, int]:
        """The next header and the size of its payload in bytes."""
        ...

    async def receive_payload(self, into: Sequence[memoryview]) -> None:
        """Write the payload of the last header into ``into``, whose sizes add up to its size. When this returns or
        raises, nothing writes into the buffers any more. A payload that is not wanted is skipped by the next
        ``receive``."""
        ...

    async def close(self) -> None:
        """End the connection; pending calls on both sides raise ConnectionError. Safe to repeat."""
        ...


ConnectionHandler = Callable[[Connection], Awaitable[None]]


class Listener(Protocol):
    """Runs the handler in a task of its own for every peer that connects, and closes the connection when it ends."""

    @property
    def address(self) -> str:
        """What peers connect to, with the port that was actually bound."""
        ...

    async def close(self) -> None:
        """Stop listening and close all accepted connections."""
        ...
