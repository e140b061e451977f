"""One incoming transfer: what of it was reserved and received.

WAITING   offered, no room yet; in the queue, in order of arrival
OPEN      blocks reserved, Accept sent; payloads land in them
ENDED     adopted by the engine (Landed), or given up (Refuse, Failed, Cancel, connection lost)
"""

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum

from common.messages import Blocks, Handover, Offer
from common.roster import Reservation
from common.sequence import SequenceKey
from kv_transfer.peer import Peer


class Phase(Enum):
    WAITING = "waiting"
    OPEN = "open"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Incoming:
    offer: Offer
    peer: Peer
    num_blocks: int
    deadline: float
    offered_at: float = field(default_factory=time.monotonic)
    phase: Phase = Phase.WAITING
    reservation: Reservation | None = None  # from OPEN on
    received: set[int] = field(default_factory=set)
    landing: bool = False  # a payload is being written into the reservation
    timer: asyncio.TimerHandle | None = None

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.offer.request_id, self.offer.attempt)

    def open(self, reservation: Reservation) -> None:
        self.phase = Phase.OPEN
        self.reservation = reservation
        self.received.update(range(reservation.num_cached_blocks))

    def fault_of_blocks(self, message: Blocks, num_bytes: int, block_bytes: int) -> str | None:
        """Why these blocks cannot be taken; None when they can."""
        run = range(message.first, message.first + message.count)
        inside = message.count > 0 and message.first >= 0 and run.stop <= self.num_blocks
        if not inside or num_bytes != message.count * block_bytes:
            return "wrong extent"
        return None if self.received.isdisjoint(run) else "repeated"

    def fault_of_handover(self, handover: Handover) -> str | None:
        generate, offer = handover.generate, self.offer
        offered = (offer.request_id, offer.attempt, offer.num_tokens)
        if (
            generate.request_id,
            generate.attempt,
            len(generate.token_ids),
        ) != offered or not handover.token_ids:
            return "handover differs from its offer"
        return None if len(self.received) == self.num_blocks else "handover before all blocks"
