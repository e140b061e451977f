"""The decode worker's side of transfers.

The life of an incoming transfer:

    WAITING   offered, no room yet; in the queue, in order of arrival
    OPEN      blocks reserved, Accept sent; payloads land in them
    ENDED     adopted by the engine (Landed), or given up (Refuse, Failed, Cancel, connection lost)

Only blocks of an OPEN transfer are ever written, only by the connection that opened it, each once: whatever
else arrives is skipped and counted. The reservation goes back to the pool when no payload is being written
into it any more, so a transfer given up in the middle of a payload ends when that payload does. Runs in one
event loop."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from common import messages
from common.config import TransferConfig
from common.messages import (
    Accept,
    Blocks,
    Cancel,
    Credit,
    Failed,
    Handover,
    Hello,
    Landed,
    Layout,
    MessageError,
    Offer,
    Ping,
    Refuse,
    Refused,
    Welcome,
    WorkerError,
)
from common.roster import Reservation
from common.sequence import SequenceKey
from kv_transfer import transport
from kv_transfer.checksum import checksum

log = logging.getLogger(__name__)

MAX_WAITING = 1024  # offers without room; more are refused as overloaded
OUTBOX = 4096  # answers not yet sent to one peer; a peer that reads none of them is cut off


class BlockSink(Protocol):
    """The engine as the receiver sees it."""

    def reserve(self, num_tokens: int, block_hashes: tuple[bytes, ...]) -> Reservation | None:
        """Blocks for ``num_tokens`` tokens and room to go on; None: not now. Raises ``Refusal`` when
        never."""
        ...

    def landing_views(self, reservation: Reservation, first: int, count: int) -> list[memoryview]:
        """Where ``count`` of the reserved blocks from the ``first`` on are to be written."""
        ...

    def landed(self, reservation: Reservation, first: int, count: int, views: list[memoryview]) -> None:
        """What was written there is right."""
        ...

    def cancel(self, reservation: Reservation) -> None: ...


@dataclass(slots=True, eq=False)
class _Incoming:
    offer: Offer
    peer: "_Peer"
    num_blocks: int
    deadline: float
    reservation: Reservation | None = None
    received: set[int] = field(default_factory=set)
    landing: bool = False  # a payload is being written into the reservation
    ended: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.offer.request_id, self.offer.attempt)


@dataclass(slots=True)
class ReceiverCounters:
    num_landed: int = 0
    received_bytes: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)  # offers, by error code
    num_failed: Counter[str] = field(default_factory=Counter)  # open transfers, by cause
    num_fenced: Counter[str] = field(default_factory=Counter)  # payloads and messages turned away, by cause


class Receiver:
    """Takes prompts in. ``adopt`` passes a landed sequence to the engine and may raise ``Refusal``."""

    def __init__(
        self,
        sink: BlockSink,
        config: TransferConfig,
        incarnation: str,
        layout: Layout,
        block_bytes: int,
        adopt: Callable[[Reservation, Handover], None],
    ) -> None:
        self.counters = ReceiverCounters()
        self.draining = False
        self._sink = sink
        self._config = config
        self._incarnation = incarnation
        self._layout = layout
        self._block_bytes = block_bytes
        self._adopt = adopt
        self._transfers: dict[str, _Incoming] = {}
        self._waiting: deque[_Incoming] = deque()

    @property
    def num_open(self) -> int:
        """Transfers offered or under way."""
        return len(self._transfers)

    async def serve(self, connection: transport.Connection) -> None:
        """Handle one peer until its connection ends; a ``ConnectionHandler``."""
        peer = _Peer(self, connection)
        try:
            await peer.run()
        except* OSError as group:
            log.info("prefill worker at %s left: %s", connection.peer, group.exceptions[0])
        except* MessageError as group:
            self.counters.num_fenced["malformed"] += 1
            log.warning("prefill worker at %s cut off: %s", connection.peer, group.exceptions[0])
        finally:
            self._lost(peer)

    def abort(self, key: SequenceKey, reason: str) -> bool:
        """Give up the transfer of this sequence, if there is one, and tell its sender."""
        for incoming in self._transfers.values():
            if incoming.key == key:
                self._fail(incoming, WorkerError("peer_lost", reason), "aborted")
                return True
        return False

    def admit_waiting(self) -> None:
        """Accept queued offers for which there is room now. To be called whenever blocks may have become
        free."""
        while self._waiting:
            incoming = self._waiting[0]
            if not incoming.ended and not self._try_accept(incoming):
                return
            self._waiting.popleft()

    # What a peer says

    def _offered(self, peer: "_Peer", offer: Offer) -> None:
        if offer.transfer_id in self._transfers or offer.num_tokens < 1 or offer.deadline_s <= 0:
            self.counters.num_fenced["offer"] += 1
            return peer.say(Refuse(offer.transfer_id, WorkerError("invalid", "repeated or empty offer")))
        if self.draining or len(self._waiting) >= MAX_WAITING:
            code: messages.ErrorCode = "draining" if self.draining else "overloaded"
            return self._refuse(peer, offer, WorkerError(code, f"decode worker is {code}"))
        num_blocks = -(-offer.num_tokens // self._layout.block_size)
        incoming = _Incoming(offer, peer, num_blocks, time.monotonic() + offer.deadline_s)
        self._transfers[offer.transfer_id] = incoming
        if self._waiting or not self._try_accept(incoming):
            self._waiting.append(incoming)
            self._set_timer(
                incoming, offer.deadline_s, WorkerError("deadline", "no room before the deadline")
            )

    def _try_accept(self, incoming: _Incoming) -> bool:
        """Reserve and accept, or refuse for good; False: no room yet."""
        offer = incoming.offer
        try:
            incoming.reservation = self._sink.reserve(offer.num_tokens, offer.block_hashes)
        except messages.Refusal as refusal:
            self._end(incoming)
            self._refuse(incoming.peer, offer, refusal.error)
            return True
        if incoming.reservation is None:
            return False
        skip = incoming.reservation.num_cached_blocks
        incoming.received.update(range(skip))
        credit = max(1, self._config.credit_bytes // self._block_bytes)
        incoming.peer.say(Accept(offer.transfer_id, skip, credit))
        # The prompt may still be queued or computing over there: only the deadline bounds the time to the
        # first block.
        self._set_timer(
            incoming, incoming.deadline - time.monotonic(), WorkerError("deadline", "transfer took too long")
        )
        return True

    async def _land(self, peer: "_Peer", message: Blocks, num_bytes: int) -> None:
        """Write a run of blocks where it belongs; anything unexpected is skipped and counted."""
        incoming = self._open_transfer(peer, message.transfer_id)
        if incoming is None:
            self.counters.num_fenced["no open transfer"] += 1
            return
        run = range(message.first, message.first + message.count)
        assert incoming.reservation is not None
        if (
            message.count < 1
            or message.first < 0
            or run.stop > incoming.num_blocks
            or num_bytes != len(run) * self._block_bytes
        ):
            return self._fence(incoming, "wrong extent")
        if not incoming.received.isdisjoint(run):
            return self._fence(incoming, "repeated")
        views = self._sink.landing_views(incoming.reservation, message.first, message.count)
        incoming.landing = True
        try:
            await peer.connection.receive_payload(views)
        finally:
            incoming.landing = False
            if incoming.ended:
                self._sink.cancel(incoming.reservation)
                self.admit_waiting()
        if incoming.ended:
            return
        if message.checksum is not None and checksum(views) != message.checksum:
            return self._fence(incoming, "checksum")
        self._sink.landed(incoming.reservation, message.first, message.count, views)
        self.counters.received_bytes += num_bytes
        incoming.received.update(run)
        peer.say(Credit(message.transfer_id, len(incoming.received)))

    def _take_over(self, peer: "_Peer", handover: Handover) -> None:
        incoming = self._open_transfer(peer, handover.transfer_id)
        if incoming is None:
            self.counters.num_fenced["no open transfer"] += 1
            return
        generate, offer = handover.generate, incoming.offer
        if (generate.request_id, generate.attempt, len(generate.token_ids)) != (
            offer.request_id,
            offer.attempt,
            offer.num_tokens,
        ) or not handover.token_ids:
            return self._fence(incoming, "handover differs from its offer")
        if len(incoming.received) != incoming.num_blocks:
            return self._fence(incoming, "handover before all blocks")
        assert incoming.reservation is not None
        try:
            self._adopt(incoming.reservation, handover)
        except messages.Refusal as refusal:
            return self._fail(incoming, refusal.error, refusal.error.code)
        self._end(incoming)
        self.counters.num_landed += 1
        peer.say(Landed(handover.transfer_id))

    def _cancelled(self, peer: "_Peer", transfer_id: str) -> None:
        incoming = self._transfers.get(transfer_id)
        if incoming is not None and incoming.peer is peer:
            self._give_up(incoming, "cancelled")

    def _open_transfer(self, peer: "_Peer", transfer_id: str) -> _Incoming | None:
        incoming = self._transfers.get(transfer_id)
        if incoming is None or incoming.peer is not peer or incoming.reservation is None:
            return None
        return incoming

    def _lost(self, peer: "_Peer") -> None:
        for incoming in [t for t in self._transfers.values() if t.peer is peer]:
            if not incoming.ended:  # as when it found room by the end of another, and was refused for good
                self._give_up(incoming, "connection lost")

    # How a transfer ends

    def _fence(self, incoming: _Incoming, cause: str) -> None:
        """Data that cannot be right: count it and give the transfer up, the sender's next attempt starts
        clean."""
        self.counters.num_fenced[cause] += 1
        self._fail(incoming, WorkerError("peer_lost", f"transfer refused: {cause}"), cause)

    def _fail(self, incoming: _Incoming, error: WorkerError, cause: str) -> None:
        incoming.peer.say(Failed(incoming.offer.transfer_id, error))
        self._give_up(incoming, cause)

    def _give_up(self, incoming: _Incoming, cause: str) -> None:
        self.counters.num_failed[cause] += 1
        self._end(incoming)
        if incoming.reservation is not None and not incoming.landing:
            self._sink.cancel(incoming.reservation)
        self.admit_waiting()

    def _end(self, incoming: _Incoming) -> None:
        incoming.ended = True
        if incoming.timer is not None:
            incoming.timer.cancel()
        del self._transfers[incoming.offer.transfer_id]

    def _refuse(self, peer: "_Peer", offer: Offer, error: WorkerError) -> None:
        self.counters.num_refused[error.code] += 1
        peer.say(Refuse(offer.transfer_id, error))

    def _set_timer(self, incoming: _Incoming, delay_s: float, error: WorkerError) -> None:
        if incoming.timer is not None:
            incoming.timer.cancel()
        loop = asyncio.get_running_loop()
        incoming.timer = loop.call_later(max(0.0, delay_s), self._fail, incoming, error, error.code)


class _Peer:
    """One connected prefill worker: greets it, hears its messages, sends the answers."""

    def __init__(self, receiver: Receiver, connection: transport.Connection) -> None:
        self.connection = connection
        self._receiver = receiver
        self._outbox: asyncio.Queue[messages.Transfer] = asyncio.Queue(OUTBOX)
        self._overrun = False

    def say(self, message: messages.Transfer) -> None:
        """Queue an answer; a peer that leaves its answers unread is cut off by the receive loop's next
        turn."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overrun = True

    async def run(self) -> None:
        async with asyncio.timeout(self._receiver._config.stall_timeout_s):
            await self._greet()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear())
            tasks.create_task(self._answer())

    async def _greet(self) -> None:
        header, _ = await self.connection.receive()
        hello = messages.decode_transfer(header)
        if not isinstance(hello, Hello):
            raise MessageError(f"expected Hello, got {type(hello).__name__}")
        receiver = self._receiver
        reason = receiver._layout.difference(hello.layout)
        if hello.expected_incarnation != receiver._incarnation:
            reason = f"incarnation: {receiver._incarnation} here, {hello.expected_incarnation} expected"
        if reason is not None:
            receiver.counters.num_fenced["incompatible"] += 1
            await self.connection.send(messages.encode(Refused(reason)))
            await self.connection.receive()  # the peer closes once it has read the reason
            raise ConnectionError(f"incompatible prefill worker: {reason}")
        await self.connection.send(messages.encode(Welcome(receiver._incarnation)))

    async def _answer(self) -> None:
        while True:
            await self.connection.send(messages.encode(await self._outbox.get()))

    async def _hear(self) -> None:
        receiver = self._receiver
        while not self._overrun:
            header, num_bytes = await self.connection.receive()
            match messages.decode_transfer(header):
                case Offer() as offer:
                    receiver._offered(self, offer)
                case Blocks() as blocks:
                    await receiver._land(self, blocks, num_bytes)
                case Handover() as handover:
                    receiver._take_over(self, handover)
                case Cancel(transfer_id=transfer_id):
                    receiver._cancelled(self, transfer_id)
                case Ping():
                    pass
                case other:
                    raise MessageError(f"unexpected {type(other).__name__} from a prefill worker")
        raise ConnectionError("peer does not read its answers")
