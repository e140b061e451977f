"""The prefill worker's side of transfers.

The life of an outgoing transfer:

    OFFERED      Offer sent; the prompt may be computing already, finished blocks wait
    ACCEPTED     runs of finished blocks go out, never more than ``credit`` unanswered
    HANDED_OVER  everything sent, Handover too; waiting for Landed
    ENDED        landed, failed or cancelled; reported once, nothing of it is sent any more

All transfers to one decode worker share one connection, a ``_Link``: one task sends, taking turns among
transfers piece by piece, and one task receives. A lost connection fails the transfers of that link and no
others; the next transfer makes a new link. Everything here runs in one event loop; the engine's thread
reaches it by ``call_soon_threadsafe``."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from common import messages
from common.config import TransferConfig
from common.messages import (
    Accept,
    Blocks,
    Cancel,
    Credit,
    DecodeTarget,
    Failed,
    Generate,
    Handover,
    Hello,
    Landed,
    Layout,
    MessageError,
    Offer,
    Refuse,
    Refused,
    TokenLogprob,
    Welcome,
    WorkerError,
)
from common.sequence import Sequence, SequenceKey
from kv_transfer import transport
from kv_transfer.checksum import checksum

log = logging.getLogger(__name__)


class BlockSource(Protocol):
    """The engine as the sender sees it."""

    def lend(self, sequence: Sequence, first: int, count: int) -> list[memoryview] | None:
        """Bytes of ``count`` blocks of the sequence from its ``first`` on, as few views as the blocks' places
        allow. All of its blocks are kept from reuse until ``take_back``. None once the sequence has ended:
        nothing to take back."""
        ...

    def take_back(self, sequence: Sequence) -> None: ...


class Outcome(NamedTuple):
    """How a transfer ended. ``error`` is None when the decode worker has taken the sequence over."""

    key: SequenceKey
    error: WorkerError | None
    exposed_s: float  # from the first token to Landed: the part of the transfer that prefill did not hide


class Phase(Enum):
    OFFERED = "offered"
    ACCEPTED = "accepted"
    HANDED_OVER = "handed over"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class _Outgoing:
    transfer_id: str
    generate: Generate
    sequence: Sequence
    offer: Offer
    num_blocks: int
    phase: Phase = Phase.OFFERED
    offer_sent: bool = False
    num_ready: int = 0  # leading blocks whose computation is finished
    num_sent: int = 0
    num_landed: int = 0
    credit: int = 0
    handover: Handover | None = None
    prefilled_at: float = 0.0
    stall_timer: asyncio.TimerHandle | None = None

    def next_run(self, max_blocks: int) -> tuple[int, int] | None:
        """The next run of blocks that may go out, as (first, count)."""
        if self.phase is not Phase.ACCEPTED:
            return None
        count = min(self.num_ready - self.num_sent, self.num_landed + self.credit - self.num_sent, max_blocks)
        return (self.num_sent, count) if count > 0 else None

    @property
    def may_hand_over(self) -> bool:
        return self.phase is Phase.ACCEPTED and self.handover is not None and self.num_sent == self.num_blocks


@dataclass(slots=True)
class SenderCounters:
    num_landed: int = 0
    num_failed: dict[str, int] = field(default_factory=dict)  # by error code
    num_cancelled: int = 0
    sent_bytes: int = 0
    sent_blocks: int = 0
    skipped_blocks: int = 0  # held by the receiver already


class Sender:
    """Hands finished prompts to decode workers. ``report`` hears the one outcome of every offered transfer,
    except of those ended by ``cancel``."""

    def __init__(
        self,
        source: BlockSource,
        config: TransferConfig,
        incarnation: str,
        layout: Layout,
        block_bytes: int,
        report: Callable[[Outcome], None],
    ) -> None:
        self.counters = SenderCounters()
        self._source = source
        self._config = config
        self._incarnation = incarnation
        self._layout = layout
        self._block_bytes = block_bytes
        self._report = report
        self._links: dict[DecodeTarget, _Link] = {}
        self._transfers: dict[SequenceKey, tuple[_Link, _Outgoing]] = {}

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    def offer(self, generate: Generate, sequence: Sequence) -> None:
        """Ask the decode worker named in ``generate`` to make room for the sequence's known tokens."""
        assert generate.decode is not None
        num_tokens = len(generate.token_ids)
        request_id, attempt = sequence.key
        transfer_id = f"{self._incarnation}.{generate.decode.incarnation}.{request_id}.{attempt}"
        offer = Offer(
            transfer_id=transfer_id,
            request_id=request_id,
            attempt=attempt,
            num_tokens=num_tokens,
            block_hashes=tuple(sequence.block_hashes[: num_tokens // self._layout.block_size]),
            deadline_s=max(0.0, sequence.deadline - time.monotonic()),
        )
        num_blocks = -(-num_tokens // self._layout.block_size)
        outgoing = _Outgoing(transfer_id, generate, sequence, offer, num_blocks)
        link = self._link(generate.decode)
        self._transfers[sequence.key] = (link, outgoing)
        link.add(outgoing)

    def progress(self, key: SequenceKey, num_computed: int) -> None:
        """The first ``num_computed`` tokens have their keys and values in the cache."""
        if (found := self._transfers.get(key)) is not None:
            link, outgoing = found
            if num_computed >= outgoing.offer.num_tokens:
                outgoing.num_ready = outgoing.num_blocks
            else:
                outgoing.num_ready = num_computed // self._layout.block_size
            link.wake()

    def hand_over(
        self,
        key: SequenceKey,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        timings: dict[str, float],
    ) -> None:
        """The prompt is computed and its first token sampled: pass the sequence on once all blocks are
        out."""
        if (found := self._transfers.get(key)) is None:
            return
        link, outgoing = found
        outgoing.prefilled_at = time.monotonic()
        outgoing.num_ready = outgoing.num_blocks
        outgoing.handover = Handover(
            transfer_id=outgoing.transfer_id,
            generate=outgoing.generate,
            token_ids=token_ids,
            logprobs=logprobs,
            num_cached_tokens=outgoing.sequence.num_cached_tokens,
            timings=timings,
        )
        link.wake()

    def cancel(self, key: SequenceKey, reason: str) -> None:
        """Give a transfer up, in whatever phase. Unknown keys are ignored: it may have ended by itself just
        now."""
        if (found := self._transfers.get(key)) is None:
            return
        link, outgoing = found
        self.counters.num_cancelled += 1
        self._end(outgoing)
        link.say_cancelled(outgoing, reason)

    async def close(self) -> None:
        for link in list(self._links.values()):
            await link.close()

    def _link(self, target: DecodeTarget) -> "_Link":
        link = self._links.get(target)
        if link is None:
            link = self._links[target] = _Link(self, target)
            link.start()
        return link

    def _end(self, outgoing: _Outgoing) -> None:
        outgoing.phase = Phase.ENDED
        if outgoing.stall_timer is not None:
            outgoing.stall_timer.cancel()
        self._transfers.pop(outgoing.sequence.key, None)

    def _fail(self, outgoing: _Outgoing, error: WorkerError) -> None:
        if outgoing.phase is Phase.ENDED:
            return
        self._end(outgoing)
        self.counters.num_failed[error.code] = self.counters.num_failed.get(error.code, 0) + 1
        self._report(Outcome(outgoing.sequence.key, error, 0.0))

    def _landed(self, outgoing: _Outgoing) -> None:
        self._end(outgoing)
        self.counters.num_landed += 1
        self._report(Outcome(outgoing.sequence.key, None, time.monotonic() - outgoing.prefilled_at))


class _Link:
    """The connection to one decode worker and the transfers that use it."""

    def __init__(self, sender: Sender, target: DecodeTarget) -> None:
        self._sender = sender
        self._target = target
        self._config = sender._config
        self._transfers: dict[str, _Outgoing] = {}
        self._turns: deque[_Outgoing] = deque()
        self._cancels: deque[Cancel] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def add(self, outgoing: _Outgoing) -> None:
        self._transfers[outgoing.transfer_id] = outgoing
        self._turns.append(outgoing)
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def say_cancelled(self, outgoing: _Outgoing, reason: str) -> None:
        self._forget(outgoing)
        if outgoing.offer_sent:
            self._cancels.append(Cancel(outgoing.transfer_id, reason))
            self.wake()

    async def _run(self) -> None:
        reason = "closed"
        try:
            await self._talk()
        except* (
            OSError,
            ValueError,
        ) as group:  # lost, silent, not speaking the protocol, or an address that is none
            reason = "; ".join(str(error) or type(error).__name__ for error in group.exceptions)
            log.warning("link to decode worker %s ended: %s", self._target.address, reason)
        finally:
            self._sender._links.pop(self._target, None)
            error = WorkerError("peer_lost", f"decode worker at {self._target.address}: {reason}")
            for outgoing in list(self._transfers.values()):
                self._sender._fail(outgoing, error)

    async def _talk(self) -> None:
        connection = await transport.connect(self._target.address, timeout_s=self._config.stall_timeout_s)
        try:
            async with asyncio.timeout(self._config.stall_timeout_s):
                await self._greet(connection)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_loop(connection))
                tasks.create_task(self._receive_loop(connection))
        finally:
            await connection.close()

    async def _greet(self, connection: transport.Connection) -> None:
        hello = Hello(self._sender._incarnation, self._target.incarnation, self._sender._layout)
        await connection.send(messages.encode(hello))
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

    async def _send_next(self, connection: transport.Connection, outgoing: _Outgoing) -> bool:
        if not outgoing.offer_sent:
            outgoing.offer_sent = True
            await connection.send(messages.encode(outgoing.offer))
        elif (
            run := outgoing.next_run(max(1, self._config.piece_bytes // self._sender._block_bytes))
        ) is not None:
            await self._send_run(connection, outgoing, *run)
        elif outgoing.may_hand_over:
            assert outgoing.handover is not None
            outgoing.phase = Phase.HANDED_OVER
            self._watch(outgoing)
            await connection.send(messages.encode(outgoing.handover))
        else:
            return False
        return True

    async def _send_run(
        self, connection: transport.Connection, outgoing: _Outgoing, first: int, count: int
    ) -> None:
        payload = self._sender._source.lend(outgoing.sequence, first, count)
        if payload is None:
            outgoing.phase = Phase.ENDED  # in the engine, this very moment: its cancel is on the way
            return
        try:
            digest = checksum(payload) if self._config.checksums else None
            if outgoing.num_sent == outgoing.num_landed:
                self._watch(outgoing)
            outgoing.num_sent += count
            await connection.send(
                messages.encode(Blocks(outgoing.transfer_id, first, count, digest)), payload
            )
        finally:
            self._sender._source.take_back(outgoing.sequence)
        self._sender.counters.sent_blocks += count
        self._sender.counters.sent_bytes += count * self._sender._block_bytes

    async def _receive_loop(self, connection: transport.Connection) -> None:
        while True:
            header, _ = await connection.receive()
            self._hear(messages.decode_transfer(header))

    def _hear(self, message: messages.Transfer) -> None:
        outgoing = self._transfers.get(getattr(message, "transfer_id", ""))
        if outgoing is None:
            return  # about a transfer we gave up: the answer crossed our Cancel
        match message:
            case Accept(skip_blocks=skip, credit=credit):
                self._accepted(outgoing, skip, credit)
            case Credit(num_landed=num_landed):
                self._credited(outgoing, num_landed)
            case Landed():
                self._forget(outgoing)
                if outgoing.phase is not Phase.HANDED_OVER:
                    raise MessageError(f"Landed for a transfer that is {outgoing.phase.value}")
                self._sender._landed(outgoing)
            case Refuse(error=error) | Failed(error=error):
                self._forget(outgoing)
                self._sender._fail(outgoing, msgspec.structs.replace(error, origin="decode"))
            case other:
                raise MessageError(f"unexpected {type(other).__name__} from a decode worker")

    def _accepted(self, outgoing: _Outgoing, skip: int, credit: int) -> None:
        if outgoing.phase is not Phase.OFFERED or not 0 <= skip <= outgoing.num_blocks or credit < 1:
            raise MessageError(
                f"Accept with skip_blocks {skip}, credit {credit} for a transfer {outgoing.phase.value}"
            )
        outgoing.phase = Phase.ACCEPTED
        outgoing.num_sent = outgoing.num_landed = skip
        outgoing.credit = credit
        self._sender.counters.skipped_blocks += skip
        self.wake()

    def _credited(self, outgoing: _Outgoing, num_landed: int) -> None:
        if not outgoing.num_landed <= num_landed <= outgoing.num_sent:
            raise MessageError(f"Credit for {num_landed} blocks, {outgoing.num_sent} were sent")
        outgoing.num_landed = num_landed
        if num_landed < outgoing.num_sent or outgoing.phase is Phase.HANDED_OVER:
            self._watch(outgoing)
        elif outgoing.stall_timer is not None:
            outgoing.stall_timer.cancel()
        self.wake()

    def _watch(self, outgoing: _Outgoing) -> None:
        """(Re)start the timer that fails the transfer when the receiver shows no progress."""
        if outgoing.stall_timer is not None:
            outgoing.stall_timer.cancel()
        loop = asyncio.get_running_loop()
        outgoing.stall_timer = loop.call_later(self._config.stall_timeout_s, self._stalled, outgoing)

    def _stalled(self, outgoing: _Outgoing) -> None:
        text = (
            f"decode worker at {self._target.address} made no progress for {self._config.stall_timeout_s:g} s"
        )
        self._sender._fail(outgoing, WorkerError("peer_lost", text))
        self.say_cancelled(outgoing, "stalled")

    def _forget(self, outgoing: _Outgoing) -> None:
        self._transfers.pop(outgoing.transfer_id, None)
