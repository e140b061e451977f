"""One outgoing transfer: what of it was computed, sent and landed.

OFFERED      Offer sent, or about to be; what is computed waits
ACCEPTED     pieces go out as they are computed (``kv_transfer.course``), never more than ``credit_bytes``
             unanswered
HANDED_OVER  everything sent, Handover too; waiting for Landed
ENDED        landed, failed or cancelled; reported once, nothing of it is sent any more
"""

import asyncio
import time
from dataclasses import dataclass
from enum import Enum

from common.messages import Generate, Handover, MessageError, Offer
from common.sequence import Sequence
from kv_transfer.course import Course, Piece


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
    course: Course
    phase: Phase = Phase.OFFERED
    offer_sent: bool = False
    sent_bytes: int = 0
    landed_bytes: int = 0
    asked_bytes: int = 0  # sent when an answer was last wanted
    credit_bytes: int = 0
    handover: Handover | None = None
    num_skipped: int = 0  # leading blocks that the receiver had already
    accepted_at: float = 0.0
    prefilled_at: float = 0.0
    busy_since: float = 0.0  # loop.time(), when everything sent before had landed
    busy_from: int = 0  # bytes landed then
    stall_timer: asyncio.TimerHandle | None = None

    def next_piece(self) -> Piece | None:
        """What may go out next."""
        if self.phase is not Phase.ACCEPTED:
            return None
        return self.course.next(self.landed_bytes + self.credit_bytes - self.sent_bytes)

    def note_sent(self, piece: Piece) -> bool:
        """Whether this piece is to be answered: a quarter of the credit was sent since the last that was, or
        nothing follows at once. What is followed by Handover is answered by Landed."""
        self.course.take(piece)
        self.sent_bytes += self.course.bytes_of(piece)
        follows = self.may_hand_over or self.next_piece() is not None
        wants_answer = not follows or self.sent_bytes - self.asked_bytes >= self.credit_bytes // 4
        if wants_answer:
            self.asked_bytes = self.sent_bytes
        return wants_answer

    @property
    def may_hand_over(self) -> bool:
        is_sent = self.course.num_gone == self.num_blocks
        return self.phase is Phase.ACCEPTED and self.handover is not None and is_sent

    def accept(self, skip_blocks: int, credit_bytes: int) -> None:
        """The receiver has made room; it holds the first ``skip_blocks`` already. Raises ``MessageError``."""
        if self.phase is not Phase.OFFERED or not 0 <= skip_blocks <= self.num_blocks or credit_bytes < 1:
            told = f"skip_blocks {skip_blocks}, credit_bytes {credit_bytes}"
            raise MessageError(f"Accept with {told} for a transfer {self.phase.value}")
        self.phase = Phase.ACCEPTED
        self.accepted_at = time.monotonic()
        self.num_skipped = skip_blocks
        self.course.begin(skip_blocks)
        self.credit_bytes = credit_bytes

    def note_landed(self, landed_bytes: int) -> bool:
        """Whether that is news. Raises ``MessageError`` when it cannot be."""
        if not self.landed_bytes <= landed_bytes <= self.sent_bytes:
            raise MessageError(f"Credit for {landed_bytes} bytes, {self.sent_bytes} were sent")
        is_news = landed_bytes > self.landed_bytes
        self.landed_bytes = landed_bytes
        return is_news

    @property
    def awaits_answer(self) -> bool:
        return self.landed_bytes < self.sent_bytes or self.phase is Phase.HANDED_OVER
