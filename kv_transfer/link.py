"""The connection of a prefill worker to one decode worker, and the transfers that share it.

One task sends, taking turns among transfers piece by piece; one task receives. When the connection is lost,
the transfers of this link fail and no others.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from common import messages
from common.config import TransferConfig
from common.device_blocks import DeviceBlocks
from common.messages import (
    Accept,
    Blocks,
    Cancel,
    Credit,
    DecodeTarget,
    Failed,
    Hello,
    Histogram,
    Landed,
    MessageError,
    Refuse,
    Refused,
    Welcome,
    WorkerError,
)
from common.metrics import SENDER_METRICS
from common.secret import Secret
from common.sequence import Sequence
from common.tally import Tally, tallies
from kv_transfer import transport
from kv_transfer.course import Piece
from kv_transfer.outgoing import Outgoing, Phase
from kv_transfer.payload import Payload, send

MEMORY = 0.8  # how much of what is known of a link's speed a further transfer leaves
MAX_PEERS = 256  # decode workers that figures are kept of: those heard of last

log = logging.getLogger(__name__)


class DeviceSource(Protocol):
    def lend_in_place(self, sequence: Sequence, first: int, count: int) -> DeviceBlocks | None:
        """As ``BlockSource.lend``: the blocks themselves, in the memory of a device."""
        ...


class BlockSource(Protocol):
    """The engine as the sender sees it."""

    def lend(
        self, sequence: Sequence, first: int, count: int, layers: range | None = None
    ) -> list[memoryview] | None:
        """Bytes of ``count`` blocks of the sequence from its ``first`` on, or of some layers of each, in
        as few views as their places allow. All of its blocks are kept from reuse until ``take_back``. None
        once the sequence has ended: nothing to take back."""
        ...

    def take_back(self, sequence: Sequence) -> None: ...

    @property
    def on_device(self) -> DeviceSource | None:
        """None where blocks lie in main memory."""
        ...


@dataclass(slots=True)
class SenderCounters:
    num_landed: int = 0
    num_failed: dict[str, int] = field(default_factory=dict)  # by error code
    num_cancelled: int = 0
    sent_bytes: int = 0
    sent_blocks: int = 0
    skipped_blocks: int = 0  # held by the receiver already
    bytes_per_s: dict[str, float] = field(default_factory=dict)  # by the decode worker's incarnation
    link_bytes: dict[str, float] = field(default_factory=dict)  # sent to it
    tallies: dict[str, Tally] = field(default_factory=lambda: tallies(SENDER_METRICS))

    def note_speed(self, incarnation: str, bytes_per_s: float) -> None:
        known = self.bytes_per_s.pop(incarnation, bytes_per_s)
        self.bytes_per_s[incarnation] = MEMORY * known + (1 - MEMORY) * bytes_per_s
        if len(self.bytes_per_s) > MAX_PEERS:
            del self.bytes_per_s[next(iter(self.bytes_per_s))]

    def note_sent(self, incarnation: str, num_blocks: int, num_bytes: int) -> None:
        self.sent_blocks += num_blocks
        self.sent_bytes += num_bytes
        self.link_bytes[incarnation] = self.link_bytes.pop(incarnation, 0.0) + num_bytes
        if len(self.link_bytes) > MAX_PEERS:
            del self.link_bytes[next(iter(self.link_bytes))]

    def histograms(self) -> dict[str, Histogram]:
        return {key: tally.read() for key, tally in self.tallies.items()}


class LinkOwner(Protocol):
    """Whom a link tells what became of its transfers."""

    def landed(self, outgoing: Outgoing) -> None: ...

    def failed(self, outgoing: Outgoing, error: WorkerError) -> None:
        """May be told again of a transfer that has ended."""
        ...

    def link_ended(self, target: DecodeTarget) -> None: ...


class Link:
    """The connection to one decode worker and the transfers that use it."""

    def __init__(
        self,
        target: DecodeTarget,
        hello: Hello,
        source: BlockSource,
        config: TransferConfig,
        counters: SenderCounters,
        owner: LinkOwner,
        secret: Secret | None = None,
    ) -> None:
        self._target = target
        self._secret = secret
        self._hello = hello
        self._source = source
        self._config = config
        self._num_layers = hello.layout.num_layers
        self._counters = counters
        self._owner = owner
        self._transfers: dict[str, Outgoing] = {}
        self._turns: deque[Outgoing] = deque()
        self._cancels: deque[Cancel] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def add(self, outgoing: Outgoing) -> None:
        self._transfers[outgoing.transfer_id] = outgoing
        self._turns.append(outgoing)
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def say_cancelled(self, outgoing: Outgoing, reason: str) -> None:
        self._forget(outgoing)
        if outgoing.offer_sent:
            self._cancels.append(Cancel(outgoing.transfer_id, reason))
            self.wake()

    async def _run(self) -> None:
        reason, connection = "closed", None
        try:
            connection = await self._connect()
            await self._talk(connection)
        except* (
            OSError,
            ValueError,
        ) as group:  # lost, silent, not speaking the protocol, or an address that is none
            reason = "; ".join(str(error) or type(error).__name__ for error in group.exceptions)
            log.warning("link to decode worker %s ended: %s", self._target.address, reason)
        finally:
            self._owner.link_ended(self._target)
            error = WorkerError("peer_lost", f"decode worker at {self._target.address}: {reason}")
            for outgoing in list(self._transfers.values()):
                self._owner.failed(outgoing, error)
            if connection is not None:
                await connection.close()  # may take a moment, for which nobody else is to wait

    async def _connect(self) -> transport.Connection:
        limits = transport.Limits(secret=self._secret)
        return await transport.connect(self._target.address, self._config.stall_timeout_s, limits=limits)

    async def _talk(self, connection: transport.Connection) -> None:
        async with asyncio.timeout(self._config.stall_timeout_s):
            await self._greet(connection)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_loop(connection))
            tasks.create_task(self._receive_loop(connection))

    async def _greet(self, connection: transport.Connection) -> None:
        await connection.send(messages.encode(self._hello))
        header, _ = await connection.receive()
        match messages.decode_transfer(header):
            case Welcome():
                return
            case Refused(reason=reason):
                raise ConnectionError(f"refused us: {reason}")
            case other:
                raise MessageError(f"expected Welcome, got {type(other).__name__}")

    async def _send_loop(self, connection: transport.Connection) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while await self._send_some(connection):
                pass

    async def _send_some(self, connection: transport.Connection) -> bool:
        """Send at most one message for every transfer; False when there was nothing to send."""
        sent = False
        while self._cancels:
            await connection.send(messages.encode(self._cancels.popleft()))
        for _ in range(len(self._turns)):
            outgoing = self._turns.popleft()
            if outgoing.phase in (Phase.ENDED, Phase.HANDED_OVER):
                continue
            self._turns.append(outgoing)
            sent = await self._send_next(connection, outgoing) or sent
        return sent

    async def _send_next(self, connection: transport.Connection, outgoing: Outgoing) -> bool:
        if not outgoing.offer_sent:
            outgoing.offer_sent = True
            await connection.send(messages.encode(outgoing.offer))
        elif (piece := outgoing.next_piece()) is not None:
            await self._send_piece(connection, outgoing, piece)
        elif outgoing.may_hand_over:
            assert outgoing.handover is not None
            outgoing.phase = Phase.HANDED_OVER
            self._watch(outgoing)
            await connection.send(messages.encode(outgoing.handover))
        else:
            return False
        return True

    async def _send_piece(self, connection: transport.Connection, outgoing: Outgoing, piece: Piece) -> None:
        payload = self._lend(connection, outgoing.sequence, piece)
        if payload is None:
            outgoing.phase = Phase.ENDED  # in the engine, this very moment: its cancel is on the way
            return
        if outgoing.sent_bytes == outgoing.landed_bytes:
            self._watch(outgoing)
            outgoing.busy_since = asyncio.get_running_loop().time()
            outgoing.busy_from = outgoing.landed_bytes
        wants_answer = outgoing.note_sent(piece)
        on_device = isinstance(payload, DeviceBlocks)
        layers = None if self._is_whole(piece) else (piece.layers.start, piece.layers.stop)
        message = Blocks(outgoing.transfer_id, piece.first, piece.count, wants_answer, on_device, layers)
        released = partial(self._source.take_back, outgoing.sequence)
        await send(connection, message, payload, self._config.checksums, released)
        num_blocks = piece.count if piece.layers.stop == self._num_layers else 0
        self._counters.note_sent(self._target.incarnation, num_blocks, outgoing.course.bytes_of(piece))

    def _is_whole(self, piece: Piece) -> bool:
        return len(piece.layers) == self._num_layers

    def _lend(self, connection: transport.Connection, sequence: Sequence, piece: Piece) -> Payload | None:
        device = self._source.on_device
        if not self._is_whole(piece):
            return self._source.lend(sequence, piece.first, piece.count, piece.layers)
        if device is None or connection.on_device is None:
            return self._source.lend(sequence, piece.first, piece.count)
        return device.lend_in_place(sequence, piece.first, piece.count)

    async def _receive_loop(self, connection: transport.Connection) -> None:
        while True:
            header, _ = await connection.receive()
            self._hear(messages.decode_transfer(header))

    def _hear(self, message: messages.Transfer) -> None:
        outgoing = self._transfers.get(getattr(message, "transfer_id", ""))
        if outgoing is None:
            return  # about a transfer we gave up: the answer crossed our Cancel
        match message:
            case Accept(skip_blocks=skip, credit_bytes=credit_bytes):
                outgoing.accept(skip, credit_bytes)
                self._counters.skipped_blocks += skip
                self.wake()
            case Credit(landed_bytes=landed_bytes):
                self._credited(outgoing, landed_bytes)
            case Landed():
                self._forget(outgoing)
                if outgoing.phase is not Phase.HANDED_OVER:
                    raise MessageError(f"Landed for a transfer that is {outgoing.phase.value}")
                self._note_landed(outgoing, outgoing.sent_bytes)
                self._owner.landed(outgoing)
            case Refuse(error=error) | Failed(error=error):
                self._forget(outgoing)
                self._owner.failed(outgoing, msgspec.structs.replace(error, origin="decode"))
            case other:
                raise MessageError(f"unexpected {type(other).__name__} from a decode worker")

    def _credited(self, outgoing: Outgoing, landed_bytes: int) -> None:
        self._note_landed(outgoing, landed_bytes)
        if outgoing.awaits_answer:
            self._watch(outgoing)
        elif outgoing.stall_timer is not None:
            outgoing.stall_timer.cancel()
        self.wake()

    def _note_landed(self, outgoing: Outgoing, landed_bytes: int) -> None:
        if outgoing.note_landed(landed_bytes) and landed_bytes == outgoing.sent_bytes:
            self._note_speed(outgoing)

    def _note_speed(self, outgoing: Outgoing) -> None:
        """All that was sent has landed."""
        duration_s = asyncio.get_running_loop().time() - outgoing.busy_since
        num_bytes = outgoing.landed_bytes - outgoing.busy_from
        if duration_s > 0:
            self._counters.note_speed(self._target.incarnation, num_bytes / duration_s)

    def _watch(self, outgoing: Outgoing) -> None:
        """(Re)start the timer that fails the transfer when the receiver shows no progress."""
        if outgoing.stall_timer is not None:
            outgoing.stall_timer.cancel()
        loop = asyncio.get_running_loop()
        outgoing.stall_timer = loop.call_later(self._config.stall_timeout_s, self._stalled, outgoing)

    def _stalled(self, outgoing: Outgoing) -> None:
        text = (
            f"decode worker at {self._target.address} made no progress for {self._config.stall_timeout_s:g} s"
        )
        self._owner.failed(outgoing, WorkerError("peer_lost", text))
        self.say_cancelled(outgoing, "stalled")

    def _forget(self, outgoing: Outgoing) -> None:
        self._transfers.pop(outgoing.transfer_id, None)
