"""The decode worker's side of transfers: from an offer to a sequence whose blocks are here.

A transfer's life is told in ``kv_transfer.incoming``, how a prefill worker is heard in ``kv_transfer.peer``.
Only blocks of an OPEN transfer are ever written, only by the connection that opened it, each once: whatever
else arrives is skipped and counted. The reservation goes back to the pool when no payload is being written
into it any more, so a transfer given up in the middle of a payload ends when that payload does. Runs in one
event loop.
"""

import asyncio
import logging
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from common import messages
from common.config import TransferConfig
from common.device_blocks import DeviceBlocks
from common.messages import (
    Accept,
    Blocks,
    Credit,
    Failed,
    Handover,
    Histogram,
    Landed,
    Layout,
    MessageError,
    Offer,
    Refuse,
    WorkerError,
)
from common.metrics import RECEIVER_METRICS
from common.roster import Reservation
from common.sequence import SequenceKey
from common.tally import Tally, tallies
from kv_transfer import transport
from kv_transfer.checksum import has_kernels
from kv_transfer.incoming import Incoming, Phase
from kv_transfer.payload import Payload, receive
from kv_transfer.peer import Incompatible, Peer

log = logging.getLogger(__name__)

MAX_WAITING = 1024  # offers without room; more are refused as overloaded


class DeviceSink(Protocol):
    def landing_in_place(self, reservation: Reservation, first: int, count: int) -> DeviceBlocks:
        """As ``BlockSink.landing_views``: the blocks themselves, in the memory of a device. ``landed`` is not
        called for them."""
        ...


class BlockSink(Protocol):
    """The engine as the receiver sees it."""

    def reserve(self, num_tokens: int, block_hashes: tuple[bytes, ...]) -> Reservation | None:
        """Blocks for ``num_tokens`` tokens and room to go on; None: not now. Raises ``Refusal`` when
        never."""
        ...

    def landing_views(
        self, reservation: Reservation, first: int, count: int, layers: range | None = None
    ) -> list[memoryview]:
        """Where ``count`` of the reserved blocks from the ``first`` on, or some layers of each, are to be
        written."""
        ...

    def landed(
        self,
        reservation: Reservation,
        first: int,
        count: int,
        views: list[memoryview],
        layers: range | None = None,
    ) -> None:
        """What was written there is right."""
        ...

    def cancel(self, reservation: Reservation) -> None: ...

    @property
    def on_device(self) -> DeviceSink | None:
        """None where blocks lie in main memory."""
        ...


@dataclass(slots=True)
class ReceiverCounters:
    num_landed: int = 0
    received_bytes: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)  # offers, by error code
    num_failed: Counter[str] = field(default_factory=Counter)  # open transfers, by cause
    num_fenced: Counter[str] = field(default_factory=Counter)  # payloads and messages turned away, by cause
    tallies: dict[str, Tally] = field(default_factory=lambda: tallies(RECEIVER_METRICS))

    def histograms(self) -> dict[str, Histogram]:
        return {key: tally.read() for key, tally in self.tallies.items()}


class Receiver:
    """Takes prompts in. ``adopt`` is given each landed sequence with its reservation, which is its own from
    then on; what becomes of the sequence is told to its proxy, not to its sender."""

    def __init__(
        self,
        sink: BlockSink,
        config: TransferConfig,
        incarnation: str,
        layout: Layout,
        block_bytes: int,
        adopt: Callable[[Reservation, Handover], None],
    ) -> None:
        has_kernels()  # compiled now, not when the first blocks have come
        self.counters = ReceiverCounters()
        self.draining = False
        self._sink = sink
        self._config = config
        self._incarnation = incarnation
        self._layout = layout
        self._block_bytes = block_bytes
        self._adopt = adopt
        self._transfers: dict[str, Incoming] = {}
        self._waiting: list[Incoming] = []  # most important first, among equals who came first

    @property
    def num_open(self) -> int:
        """Transfers offered or under way."""
        return len(self._transfers)

    async def serve(self, connection: transport.Connection) -> None:
        """Handle one peer until its connection ends; a ``ConnectionHandler``."""
        peer = Peer(connection)
        try:
            async with asyncio.timeout(self._config.stall_timeout_s):
                await peer.greet(self._incarnation, self._layout)
            await peer.run(self)
        except* Incompatible as group:
            self.counters.num_fenced["incompatible"] += 1
            log.warning("prefill worker at %s refused: %s", connection.peer, group.exceptions[0])
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
            if incoming.phase is Phase.WAITING and not self._try_accept(incoming):
                return
            self._waiting.pop(0)

    # What a peer says

    def offered(self, peer: Peer, offer: Offer) -> None:
        if offer.transfer_id in self._transfers or offer.num_tokens < 1 or offer.deadline_s <= 0:
            self.counters.num_fenced["offer"] += 1
            return peer.say(Refuse(offer.transfer_id, WorkerError("invalid", "repeated or empty offer")))
        if self.draining or len(self._waiting) >= MAX_WAITING:
            code: messages.ErrorCode = "draining" if self.draining else "overloaded"
            return self._refuse(peer, offer, WorkerError(code, f"decode worker is {code}"))
        num_blocks = -(-offer.num_tokens // self._layout.block_size)
        deadline = time.monotonic() + offer.deadline_s
        incoming = Incoming(offer, peer, num_blocks, self._layout.num_layers, deadline)
        self._transfers[offer.transfer_id] = incoming
        self._set_timer(incoming, "no room before the deadline")
        insort(self._waiting, incoming, key=attrgetter("offer.priority"))
        self.admit_waiting()

    async def land(self, peer: Peer, message: Blocks, num_bytes: int) -> None:
        """Write a run of blocks where it belongs; anything unexpected is skipped and counted."""
        incoming = self._open_transfer(peer, message.transfer_id)
        if incoming is None:
            self.counters.num_fenced["no open transfer"] += 1
            return
        if (fault := incoming.fault_of_blocks(message, num_bytes, self._block_bytes)) is not None:
            return self._fence(incoming, fault)
        reservation = incoming.reservation
        assert reservation is not None
        place = self._place(peer.connection, reservation, message)
        incoming.landing = True
        try:
            async with asyncio.timeout(self._config.stall_timeout_s):  # or the connection is closed
                is_right = await receive(peer.connection, message, place, num_bytes // message.count)
        finally:
            incoming.landing = False
            if incoming.phase is Phase.ENDED:
                self._give_room_back(reservation)
        if incoming.phase is Phase.ENDED:
            return
        if not is_right:
            return self._fence(incoming, "checksum")
        if not isinstance(place, DeviceBlocks):
            self._sink.landed(reservation, message.first, message.count, place, layers_of(message))
        self.counters.received_bytes += num_bytes
        incoming.note_landed(message, num_bytes)
        if message.wants_answer:
            peer.say(Credit(message.transfer_id, incoming.landed_bytes))

    def _place(self, connection: transport.Connection, reservation: Reservation, message: Blocks) -> Payload:
        device = self._sink.on_device
        if device is None or connection.on_device is None or not message.on_device:
            return self._sink.landing_views(reservation, message.first, message.count, layers_of(message))
        return device.landing_in_place(reservation, message.first, message.count)

    def take_over(self, peer: Peer, handover: Handover) -> None:
        incoming = self._open_transfer(peer, handover.transfer_id)
        if incoming is None:
            self.counters.num_fenced["no open transfer"] += 1
            return
        if (fault := incoming.fault_of_handover(handover)) is not None:
            return self._fence(incoming, fault)
        assert incoming.reservation is not None
        # Said first: the steps that begin now would keep it waiting for a core.
        peer.say(Landed(handover.transfer_id))
        self._adopt(incoming.reservation, handover)  # before the end: what is under way here is somewhere
        self._end(incoming)
        self.counters.num_landed += 1

    def cancelled(self, peer: Peer, transfer_id: str) -> None:
        incoming = self._transfers.get(transfer_id)
        if incoming is not None and incoming.peer is peer:
            self._give_up(incoming, "cancelled")

    def _open_transfer(self, peer: Peer, transfer_id: str) -> Incoming | None:
        incoming = self._transfers.get(transfer_id)
        if incoming is None or incoming.peer is not peer or incoming.phase is not Phase.OPEN:
            return None
        return incoming

    def _lost(self, peer: Peer) -> None:
        for incoming in [t for t in self._transfers.values() if t.peer is peer]:
            # The end of one may have found room for another of them, and had it refused for good.
            if incoming.phase is not Phase.ENDED:
                self._give_up(incoming, "connection lost")

    # How a transfer opens

    def _try_accept(self, incoming: Incoming) -> bool:
        """Reserve and accept, or refuse for good; False: no room yet."""
        offer = incoming.offer
        try:
            reservation = self._sink.reserve(offer.num_tokens, offer.block_hashes)
        except messages.Refusal as refusal:
            self._end(incoming)
            self._refuse(incoming.peer, offer, refusal.error)
            return True
        if reservation is None:
            return False
        incoming.open(reservation)
        self.counters.tallies["offer_wait_seconds"].observe(time.monotonic() - incoming.offered_at)
        credit_bytes = max(self._config.credit_bytes, self._block_bytes)
        incoming.peer.say(Accept(offer.transfer_id, reservation.num_cached_blocks, credit_bytes))
        # The prompt may still be computing over there: only the deadline bounds the time to the first block.
        self._set_timer(incoming, "transfer took too long")
        return True

    # How a transfer ends

    def _fence(self, incoming: Incoming, cause: str) -> None:
        """Data that cannot be right: count it and give the transfer up, the sender's next attempt starts
        clean."""
        self.counters.num_fenced[cause] += 1
        self._fail(incoming, WorkerError("peer_lost", f"transfer refused: {cause}"), cause)

    def _fail(self, incoming: Incoming, error: WorkerError, cause: str) -> None:
        incoming.peer.say(Failed(incoming.offer.transfer_id, error))
        self._give_up(incoming, cause)

    def _give_up(self, incoming: Incoming, cause: str) -> None:
        self.counters.num_failed[cause] += 1
        self._end(incoming)
        if incoming.reservation is None or incoming.landing:
            return  # nothing to give back, or not before the payload under way has been written
        self._give_room_back(incoming.reservation)

    def _give_room_back(self, reservation: Reservation) -> None:
        self._sink.cancel(reservation)
        self.admit_waiting()

    def _end(self, incoming: Incoming) -> None:
        incoming.phase = Phase.ENDED
        if incoming.timer is not None:
            incoming.timer.cancel()
        del self._transfers[incoming.offer.transfer_id]

    def _refuse(self, peer: Peer, offer: Offer, error: WorkerError) -> None:
        self.counters.num_refused[error.code] += 1
        peer.say(Refuse(offer.transfer_id, error))

    def _set_timer(self, incoming: Incoming, text: str) -> None:
        """What happens at the deadline."""
        if incoming.timer is not None:
            incoming.timer.cancel()
        delay_s = max(0.0, incoming.deadline - time.monotonic())
        error = WorkerError("deadline", text)
        loop = asyncio.get_running_loop()
        incoming.timer = loop.call_later(delay_s, self._fail, incoming, error, error.code)


def layers_of(message: Blocks) -> range | None:
    return None if message.layers is None else range(*message.layers)
