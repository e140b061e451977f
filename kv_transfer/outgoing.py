"""One outgoing transfer: what of it was computed, sent and landed.

OFFERED      Offer sent, or about to be; finished blocks wait
ACCEPTED     runs of finished blocks go out, never more than ``credit`` unanswered
HANDED_OVER  everything sent, Handover too; waiting for Landed
ENDED        landed, failed or cancelled; reported once, nothing of it is sent any more
"""

import asyncio
import time
from dataclasses import dataclass
from enum import Enum

from common.messages import Generate, Handover, MessageError, Offer
from common.sequence import Sequence


class Phase(Enum):
    OFFERED = "offered"
    ACCEPTED = "accepted"
    HANDED_OVER = "handed over"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Outgoing:
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
    num_asked: int = 0  # of those sent, which of them were last to want an answer
    credit: int = 0
    handover: Handover | None = None
    num_skipped: int = 0  # leading blocks that the receiver had already
    accepted_at: float = 0.0
    prefilled_at: float = 0.0
    busy_since: float = 0.0  # loop.time(), when everything sent before had landed
    busy_from: int = 0  # blocks landed then
    stall_timer: asyncio.TimerHandle | None = None

    def next_run(self, max_blocks: int) -> tuple[int, int] | None:
        """The next run of blocks that may go out, as (first, count)."""
        if self.phase is not Phase.ACCEPTED:
            return None
        count = min(self.num_ready - self.num_sent, self.num_landed + self.credit - self.num_sent, max_blocks)
        return (self.num_sent, count) if count > 0 else None

    def note_sent(self, count: int) -> bool:
        """Whether this run is to be answered: a quarter of the credit was sent since the last that was, or
        nothing follows at once. What is followed by Handover is answered by Landed."""
        self.num_sent += count
        follows = self.may_hand_over or self.next_run(1) is not None
        wants_answer = not follows or self.num_sent - self.num_asked >= self.credit // 4
        if wants_answer:
            self.num_asked = self.num_sent
        return wants_answer

    @property
    def may_hand_over(self) -> bool:
        return self.phase is Phase.ACCEPTED and self.handover is not None and self.num_sent == self.num_blocks

    def accept(self, skip_blocks: int, credit: int) -> None:
        """The receiver has made room; it holds the first ``skip_blocks`` already. Raises ``MessageError``."""
        if self.phase is not Phase.OFFERED or not 0 <= skip_blocks <= self.num_blocks or credit < 1:
            text = f"Accept with skip_blocks {skip_blocks}, credit {credit} for a transfer {self.phase.value}"
            raise MessageError(text)
        self.phase = Phase.ACCEPTED
        self.accepted_at = time.monotonic()
        self.num_sent = self.num_landed = self.num_asked = self.num_skipped = skip_blocks
        self.credit = credit

    def note_landed(self, num_landed: int) -> bool:
        """Whether that is news. Raises ``MessageError`` when it cannot be."""
        if not self.num_landed <= num_landed <= self.num_sent:
            raise MessageError(f"Credit for {num_landed} blocks, {self.num_sent} were sent")
        is_news = num_landed > self.num_landed
        self.num_landed = num_landed
        return is_news

    @property
    def awaits_answer(self) -> bool:
        return self.num_landed < self.num_sent or self.phase is Phase.HANDED_OVER
