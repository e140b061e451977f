"""One incoming transfer: what of it was reserved and received.

WAITING   offered, no room yet; in the queue, the most important first
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
    num_layers: int
    deadline: float
    offered_at: float = field(default_factory=time.monotonic)
    phase: Phase = Phase.WAITING
    reservation: Reservation | None = None  # from OPEN on
    layers_here: list[int] = field(default_factory=list)  # of each block, how many layers
    landed_bytes: int = 0
    landing: bool = False  # a payload is being written into the reservation
    timer: asyncio.TimerHandle | None = None

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.offer.request_id, self.offer.attempt)

    def open(self, reservation: Reservation) -> None:
        self.phase = Phase.OPEN
        self.reservation = reservation
        num_cached = reservation.num_cached_blocks
        self.layers_here = [self.num_layers] * num_cached + [0] * (self.num_blocks - num_cached)

    def fault_of_blocks(self, message: Blocks, num_bytes: int, block_bytes: int) -> str | None:
        """Why these blocks cannot be taken; None when they can."""
        end, (start, stop) = message.first + message.count, message.layers or (0, self.num_layers)
        inside = message.count > 0 and message.first >= 0 and end <= self.num_blocks
        is_part = 0 <= start < stop <= self.num_layers and not (message.layers and message.on_device)
        layer_bytes = block_bytes // self.num_layers
        if not inside or not is_part or num_bytes != message.count * (stop - start) * layer_bytes:
            return "wrong extent"
        here = self.layers_here[message.first : end]
        if any(num_layers > start for num_layers in here):
            return "repeated"
        return None if all(num_layers == start for num_layers in here) else "layers are missing"

    def note_landed(self, message: Blocks, num_bytes: int) -> None:
        stop = message.layers[1] if message.layers else self.num_layers
        self.layers_here[message.first : message.first + message.count] = [stop] * message.count
        self.landed_bytes += num_bytes

    def fault_of_handover(self, handover: Handover) -> str | None:
        generate, offer = handover.generate, self.offer
        offered = (offer.request_id, offer.attempt, offer.num_tokens)
        if (
            generate.request_id,
            generate.attempt,
            len(generate.token_ids),
        ) != offered or not handover.token_ids:
            return "handover differs from its offer"
        is_whole = all(num_layers == self.num_layers for num_layers in self.layers_here)
        return None if is_whole else "handover before all blocks"
