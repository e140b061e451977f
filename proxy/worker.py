"""One worker, as far as this proxy knows."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from common.channel import Peer
from common.messages import Role, Status
from proxy.breaker import Breaker
from proxy.fleet import UNLIMITED, Candidate

State = Literal["ready", "silent", "refused"]


class Charge(NamedTuple):
    """What an attempt under way costs a worker until its next reports show it."""

    num_tokens: int  # that need room
    num_to_compute: int
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
    _candidate: Candidate | None = None  # while nothing has changed

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

    @property
    def shown_state(self) -> str:
        """As people are told it."""
        return "draining" if self.state == "ready" and self.draining else self.state

    def hear(self, status: Status, now: float) -> None:
        self.status, self.heard_at = status, now
        self.draining = self.draining or status.draining
        self._candidate = None

    def charge(self, request_id: str, charge: Charge) -> None:
        self.charges[request_id] = charge
        self._candidate = None

    def computed(self, request_id: str) -> None:
        """The prompt is."""
        charge = self.charges.get(request_id)
        if charge is not None and charge.num_to_compute:
            self.charge(request_id, charge._replace(num_to_compute=0))

    def settle(self, request_id: str) -> None:
        """Nothing happens where there is no such charge any more."""
        if self.charges.pop(request_id, None) is not None:
            self._candidate = None

    def settle_all(self) -> None:
        self.charges.clear()
        self._candidate = None

    def candidate(self, now: float) -> Candidate:
        trusted = self.breaker.allows(now)
        if self._candidate is None or self._candidate.trusted != trusted:
            self._candidate = self._describe(trusted)
        return self._candidate

    def _describe(self, trusted: bool) -> Candidate:
        """Reports lag behind, and do not know what other proxies are about to send: the load is what was
        reported plus what was sent since, and never less than what this proxy has under way."""
        status, load, layout = self.status, self.status.load, self.status.layout
        since = [charge for charge in self.charges.values() if charge.made_at > self.heard_at]
        own_tokens = sum(charge.num_to_compute for charge in self.charges.values())
        new_tokens = sum(charge.num_to_compute for charge in since)
        new_room = sum(charge.num_tokens for charge in since)
        reported = load.num_running + load.num_waiting + load.num_receiving
        return Candidate(
            incarnation=self.incarnation,
            queued_tokens=max(own_tokens, load.num_queued_tokens + new_tokens),
            num_sequences=max(len(self.charges), reported + len(since)),
            free_blocks=load.num_free_blocks - -(-new_room // layout.block_size),
            block_size=layout.block_size,
            max_sequence_tokens=status.max_sequence_tokens or UNLIMITED,
            trusted=trusted,
            last_used=self.last_used,
            name=self.name,
            pace=status.pace,
            block_bytes=status.block_bytes,
            links=status.links,
            mean_link=sum(status.links.values()) / len(status.links) if status.links else 0.0,
            locality=status.locality,
            seat=status.seat,
        )
