"""One worker, as far as this proxy knows."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from common.channel import Peer
from common.messages import Role, Status
from proxy.breaker import Breaker
from proxy.router import Candidate

State = Literal["ready", "silent", "refused"]


class Charge(NamedTuple):
    """What an attempt under way costs a worker until its next reports show it."""

    num_tokens: int
    made_at: float


@dataclass(slots=True, eq=False)
class Worker:
    peer: Peer
    status: Status
    heard_at: float  # time.monotonic(), of its last Status
    spoke_at: float = 0.0  # of its last other message
    state: State = "silent"  # until it is examined
    reason: str = ""  # of a refusal
    draining: bool = False
    breaker: Breaker = field(default_factory=Breaker)
    charges: dict[str, Charge] = field(default_factory=dict)  # request id -> this proxy's work on it
    last_used: int = 0

    @property
    def incarnation(self) -> str:
        return self.status.incarnation

    @property
    def role(self) -> Role:
        return self.status.role

    @property
    def name(self) -> str:
        return self.status.name

    @property
    def takes_work(self) -> bool:
        return self.state == "ready" and not self.draining

    def candidate(self, now: float) -> Candidate:
        """Reports lag behind, and do not know what other proxies are about to send: the load is what was
        reported plus what was sent since, and never less than what this proxy has under way."""
        load, layout = self.status.load, self.status.layout
        since = [charge for charge in self.charges.values() if charge.made_at > self.heard_at]
        own_tokens = sum(charge.num_tokens for charge in self.charges.values())
        new_tokens = sum(charge.num_tokens for charge in since)
        reported = load.num_running + load.num_waiting + load.num_receiving
        return Candidate(
            incarnation=self.incarnation,
            queued_tokens=max(own_tokens, load.num_queued_tokens + new_tokens),
            num_sequences=max(len(self.charges), reported + len(since)),
            free_blocks=load.num_free_blocks - -(-new_tokens // layout.block_size),
            block_size=layout.block_size,
            max_sequence_tokens=self.status.max_sequence_tokens,
            trusted=self.breaker.allows(now),
            last_used=self.last_used,
        )
