"""The workers, as far as this proxy knows.

    Status of a new session          compared with the others: welcomed, or refused with the field that
                                     differs
    silent for ``dead_after_s``      silent: gets no work and no pings; its next Status makes it ready again
    connection lost, or the same     forgotten; the session's requests are void
    incarnation in a new session

The registry only knows; who calls it tells the requests that run on a lost worker.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from common.channel import PING_INTERVAL_S, Peer
from common.messages import Role, Status
from proxy.breaker import Breaker
from proxy.router import Candidate, Snapshot

State = Literal["ready", "silent", "refused"]

logger = logging.getLogger(__name__)


class Charge(NamedTuple):
    """What an attempt under way costs a worker until its next reports show it."""

    num_tokens: int
    made_at: float


@dataclass(slots=True, eq=False)
class Worker:
    peer: Peer
    status: Status
    heard_at: float  # time.monotonic()
    state: State = "ready"
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


class Registry:
    def __init__(self, dead_after_s: float, fingerprint: str = "", allows_fallback: bool = True) -> None:
        """``fingerprint`` of the model whose tokenizer this proxy has; empty: any model will do."""
        self._dead_after_s = dead_after_s
        self._fingerprint = fingerprint
        self._allows_fallback = allows_fallback
        self._workers: dict[Peer, Worker] = {}
        self._expects_prefill = False
        self._num_dispatched = 0
        self._swept_at = time.monotonic()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def find(self, peer: Peer) -> Worker | None:
        return self._workers.get(peer)

    def worker(self, incarnation: str) -> Worker | None:
        return next((w for w in self if w.incarnation == incarnation and w.state == "ready"), None)

    def ready(self, role: Role | None = None) -> list[Worker]:
        """Workers that would take work now."""
        return [w for w in self if w.takes_work and role in (None, w.role)]

    def missing_roles(self) -> list[Role]:
        """Roles without which requests are refused or served in a worse way."""
        expected: list[Role] = ["prefill", "decode"] if self._expects_prefill else ["decode"]
        return [role for role in expected if not self.ready(role)]

    @property
    def serves(self) -> bool:
        """Whether a request would be served now."""
        missing = self.missing_roles()
        return "decode" not in missing and (self._allows_fallback or not missing)

    def hear(self, peer: Peer, status: Status) -> "Heard":
        """Take in a Status. The caller answers it and voids the requests of the lost workers."""
        now = time.monotonic()
        worker = self._workers.get(peer)
        if worker is not None and worker.state == "ready":
            worker.status, worker.heard_at = status, now
            worker.draining = worker.draining or status.draining
            return Heard(worker, False, ())
        lost = [w for w in self if w.incarnation == status.incarnation and w.peer != peer]
        for old in lost:
            del self._workers[old.peer]
        refused_before = worker is not None and worker.state == "refused"
        reason = self._objection(peer, status)
        if worker is None or refused_before:
            worker = self._workers[peer] = Worker(peer, status, now, draining=status.draining)
        worker.status, worker.heard_at, worker.reason = status, now, reason
        worker.state = "refused" if reason else "ready"
        if reason:
            if not refused_before:
                logger.error("%s worker %s is refused: %s", status.role, status.name, reason)
            return Heard(worker, not refused_before, tuple(lost))
        logger.info("%s worker %s (%s) is ready", status.role, status.name, status.incarnation)
        self._expects_prefill = self._expects_prefill or status.role == "prefill"
        return Heard(worker, True, tuple(lost))

    def forget(self, peer: Peer, reason: str) -> Worker | None:
        """The session is over."""
        worker = self._workers.pop(peer, None)
        if worker is not None:
            logger.warning("%s worker %s is lost: %s", worker.role, worker.name, reason)
        return worker

    def sweep(self) -> list[Worker]:
        """Find the workers that have fallen silent; call it every ``PING_INTERVAL_S``."""
        now = time.monotonic()
        stalled = now - self._swept_at > 2 * PING_INTERVAL_S
        self._swept_at = now
        if stalled:  # this process stood still: what the workers said meanwhile is not read yet
            return []
        silent = [w for w in self if now - w.heard_at > self._dead_after_s]
        for worker in silent:
            if worker.state == "refused":
                del self._workers[worker.peer]
            elif worker.state == "ready":
                worker.state = "silent"
                worker.charges.clear()
                logger.warning("%s worker %s is silent", worker.role, worker.name)
        return [w for w in silent if w.state == "silent"]

    def charge(self, worker: Worker, request_id: str, num_tokens: int) -> None:
        self._num_dispatched += 1
        worker.last_used = self._num_dispatched
        worker.charges[request_id] = Charge(num_tokens, time.monotonic())
        worker.breaker.dispatched(request_id)

    def settle(self, worker: Worker, request_id: str) -> None:
        worker.charges.pop(request_id, None)
        worker.breaker.settled(request_id)

    def snapshot(self) -> Snapshot:
        now = time.monotonic()
        return Snapshot(
            prefill=[w.candidate(now) for w in self.ready("prefill")],
            decode=[w.candidate(now) for w in self.ready("decode")],
            expects_prefill=self._expects_prefill,
            allows_fallback=self._allows_fallback,
        )

    def max_sequence_tokens(self) -> int | None:
        """The longest sequence that some pair can hold; None when that is not known."""
        limits = [_longest(self.ready(role)) for role in ("prefill", "decode")]
        return min((limit for limit in limits if limit), default=None)

    def max_model_len(self) -> int | None:
        return min((w.status.model.max_model_len for w in self if w.state != "refused"), default=None)

    def _objection(self, peer: Peer, status: Status) -> str:
        """Why the worker cannot work with this proxy or with the other workers; empty when it can."""
        if self._fingerprint and status.model.fingerprint != self._fingerprint:
            return f"model_fingerprint: {self._fingerprint!r} here, {status.model.fingerprint!r} there"
        others = (w for w in self if w.peer != peer and w.state == "ready")
        oldest = next(others, None)
        if oldest is None:
            return ""
        difference = oldest.status.layout.difference(status.layout)
        return f"{difference} (compared with {oldest.name})" if difference else ""


class Heard(NamedTuple):
    worker: Worker
    needs_answer: bool  # Welcome or Refused is due
    lost: tuple[Worker, ...]  # earlier sessions of the same worker


def _longest(workers: Iterable[Worker]) -> int | None:
    limits = [worker.status.max_sequence_tokens for worker in workers]
    return None if not limits or 0 in limits else max(limits)
