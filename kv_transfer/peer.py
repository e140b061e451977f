"""A connected prefill worker, as a decode worker sees it: greeted, heard, answered."""

import asyncio
from typing import Protocol

from common import messages
from common.messages import (
    Blocks,
    Cancel,
    Handover,
    Hello,
    Layout,
    MessageError,
    Offer,
    Ping,
    Refused,
    Welcome,
)
from kv_transfer import transport

OUTBOX = 4096  # answers not yet sent; a peer that reads none of them is cut off


class Incompatible(ConnectionError):
    """The two cannot work together; the text names the field."""


class Hearer(Protocol):
    """Who deals with what a peer says."""

    def offered(self, peer: "Peer", offer: Offer) -> None: ...

    async def land(self, peer: "Peer", message: Blocks, num_bytes: int) -> None:
        """The payload of ``num_bytes`` is next on the peer's connection."""
        ...

    def take_over(self, peer: "Peer", handover: Handover) -> None: ...

    def cancelled(self, peer: "Peer", transfer_id: str) -> None: ...


class Peer:
    def __init__(self, connection: transport.Connection) -> None:
        self.connection = connection
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(OUTBOX)
        self._overrun = False

    def say(self, message: messages.Transfer) -> None:
        """Answer at once, or when the peer has room for it; one that leaves its answers unread is cut off by
        the receive loop's next turn."""
        answer = messages.encode(message)
        if self._outbox.empty() and self.connection.send_now(answer):
            return
        try:
            self._outbox.put_nowait(answer)
        except asyncio.QueueFull:
            self._overrun = True

    async def greet(self, incarnation: str, layout: Layout) -> None:
        """Raises ``Incompatible`` once the peer has been told, ``MessageError`` for anything but a Hello."""
        header, _ = await self.connection.receive()
        hello = messages.decode_transfer(header)
        if not isinstance(hello, Hello):
            raise MessageError(f"expected Hello, got {type(hello).__name__}")
        reason = layout.difference(hello.layout)
        if hello.expected_incarnation != incarnation:
            reason = f"incarnation: {incarnation} here, {hello.expected_incarnation} expected"
        if reason is not None:
            await self.connection.send(messages.encode(Refused(reason)))
            raise Incompatible(reason)
        await self.connection.send(messages.encode(Welcome(incarnation)))

    async def run(self, hearer: Hearer) -> None:
        """Until the connection ends, which raises."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear(hearer))
            tasks.create_task(self._answer())

    async def _answer(self) -> None:
        while True:
            await self.connection.send(await self._outbox.get())

    async def _hear(self, hearer: Hearer) -> None:
        while not self._overrun:
            header, num_bytes = await self.connection.receive()
            match messages.decode_transfer(header):
                case Offer() as offer:
                    hearer.offered(self, offer)
                case Blocks() as blocks:
                    await hearer.land(self, blocks, num_bytes)
                case Handover() as handover:
                    hearer.take_over(self, handover)
                case Cancel(transfer_id=transfer_id):
                    hearer.cancelled(self, transfer_id)
                case Ping():
                    pass
                case other:
                    raise MessageError(f"unexpected {type(other).__name__} from a prefill worker")
        raise ConnectionError("peer does not read its answers")
