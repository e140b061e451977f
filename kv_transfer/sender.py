"""The prefill worker's side of transfers: from a sequence that has its blocks to a decode worker that has
them.

A transfer's life is told in ``kv_transfer.outgoing``, how messages travel in ``kv_transfer.link``: there is
one link to each decode worker, made when it is first needed and again after it was lost. Everything here runs
in one event loop; the engine's thread reaches it by ``call_soon_threadsafe``."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from common.config import TransferConfig
from common.messages import (
    DecodeTarget,
    Generate,
    Handover,
    Hello,
    Layout,
    Offer,
    TokenLogprob,
    WorkerError,
)
from common.secret import Secret
from common.sequence import Sequence, SequenceKey
from kv_transfer.checksum import has_kernels
from kv_transfer.course import Course
from kv_transfer.link import BlockSource, Link, SenderCounters
from kv_transfer.outgoing import Outgoing, Phase


class Outcome(NamedTuple):
    """How a transfer ended. ``error`` is None when the decode worker has taken the sequence over."""

    sequence: Sequence
    error: WorkerError | None
    exposed_s: float  # from the first token to Landed: the part of the transfer that prefill did not hide

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key


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
        secret: Secret | None = None,
    ) -> None:
        has_kernels()  # compiled now, not when the first blocks leave
        self._secret = secret
        self.counters = SenderCounters()
        self._source = source
        self._config = config
        self._incarnation = incarnation
        self._layout = layout
        self._block_bytes = block_bytes
        self._report = report
        self._links: dict[DecodeTarget, Link] = {}
        self._transfers: dict[SequenceKey, tuple[Link, Outgoing]] = {}

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
            priority=sequence.priority,
        )
        num_blocks = -(-num_tokens // self._layout.block_size)
        num_layers = self._layout.num_layers
        course = Course(num_layers, self._block_bytes // num_layers, self._config.piece_bytes)
        outgoing = Outgoing(transfer_id, generate, sequence, offer, num_blocks, course)
        link = self._link(generate.decode)
        self._transfers[sequence.key] = (link, outgoing)
        link.add(outgoing)

    def progress(self, key: SequenceKey, num_computed: int, num_layers: int | None = None) -> None:
        """The first ``num_computed`` tokens have their keys and values in the cache; with ``num_layers``,
        those that a step is computing have those of so many layers."""
        if (found := self._transfers.get(key)) is None:
            return
        link, outgoing = found
        num_blocks = num_computed // self._layout.block_size
        if num_computed >= outgoing.offer.num_tokens:
            num_blocks = outgoing.num_blocks
        if num_layers is None:
            outgoing.course.note_whole(num_blocks)
        else:
            outgoing.course.note_partial(num_blocks, num_layers)
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
        outgoing.course.note_whole(outgoing.num_blocks)
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
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _link(self, target: DecodeTarget) -> Link:
        link = self._links.get(target)
        if link is None:
            hello = Hello(self._incarnation, target.incarnation, self._layout)
            link = Link(
                target,
                hello,
                self._source,
                self._config,
                self.counters,
                owner=self,
                secret=self._secret,
            )
            self._links[target] = link
            link.start()
        return link

    # What links tell

    def link_ended(self, target: DecodeTarget) -> None:
        self._links.pop(target, None)

    def _end(self, outgoing: Outgoing) -> None:
        outgoing.phase = Phase.ENDED
        if outgoing.stall_timer is not None:
            outgoing.stall_timer.cancel()
        self._transfers.pop(outgoing.sequence.key, None)

    def failed(self, outgoing: Outgoing, error: WorkerError) -> None:
        if outgoing.phase is Phase.ENDED:
            return
        self._end(outgoing)
        self.counters.num_failed[error.code] = self.counters.num_failed.get(error.code, 0) + 1
        self._report(Outcome(outgoing.sequence, error, 0.0))

    def landed(self, outgoing: Outgoing) -> None:
        self._end(outgoing)
        now = time.monotonic()
        exposed_s = now - outgoing.prefilled_at
        self.counters.num_landed += 1
        seen = self.counters.tallies
        seen["transfer_seconds"].observe(now - outgoing.accepted_at)
        seen["exposed_transfer_seconds"].observe(exposed_s)
        seen["transfer_bytes"].observe((outgoing.num_blocks - outgoing.num_skipped) * self._block_bytes)
        self._report(Outcome(outgoing.sequence, None, exposed_s))
