"""The workers, as far as this proxy knows.

    Status of a new session          compared with the others: welcomed, or refused with the field that
                                     differs
    silent for ``dead_after_s``      silent: gets no work and no pings; its next Status makes it ready again
    connection lost, or the same     forgotten; the session's requests are void
    incarnation in a new session
    removed                          refused from then on, whatever it does, until its process is another

The registry only knows; who calls it tells the requests that run on a lost worker.
"""

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from common.channel import PING_INTERVAL_S, Peer, Recent
from common.messages import BlocksRemoved, BlocksStored, Role, Status
from proxy.fleet import fleet_of
from proxy.index import BlockIndex
from proxy.router import Snapshot
from proxy.worker import Charge, Worker

logger = logging.getLogger(__name__)


class Heard(NamedTuple):
    worker: Worker
    needs_answer: bool = False  # Welcome or Refused is due
    lost: tuple[Worker, ...] = ()  # earlier sessions of the same worker


class Registry:
    def __init__(self, dead_after_s: float, fingerprint: str = "", allows_fallback: bool = True) -> None:
        """``fingerprint`` of the model whose tokenizer this proxy has; empty: any model will do."""
        self._dead_after_s = dead_after_s
        self._fingerprint = fingerprint
        self._allows_fallback = allows_fallback
        self.index = BlockIndex()
        self._workers: dict[Peer, Worker] = {}
        self._removed = Recent()  # incarnations
        self._expects_prefill = False
        self._num_dispatched = 0
        self._swept_at = time.monotonic()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def find(self, peer: Peer) -> Worker | None:
        return self._workers.get(peer)

    def worker(self, incarnation: str) -> Worker | None:
        return next((w for w in self if w.incarnation == incarnation and w.state == "ready"), None)

    def named(self, name: str) -> list[Worker]:
        """Workers of that name, of which there may be several, or the one of that incarnation."""
        return [worker for worker in self if name in (worker.name, worker.incarnation)]

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

    def hear(self, peer: Peer, status: Status) -> Heard:
        """Take in a Status. The caller answers it, and voids the requests of the lost workers."""
        worker = self._workers.get(peer)
        if worker is None:
            return self._meet(peer, status)
        worker.hear(status, time.monotonic())
        if worker.state == "ready":
            return Heard(worker)
        return Heard(worker, needs_answer=self._examine(worker))

    def _meet(self, peer: Peer, status: Status) -> Heard:
        """A new session, perhaps of a worker that had another."""
        worker = Worker(peer, status, time.monotonic(), draining=status.draining)
        lost = tuple(w for w in self if w.incarnation == status.incarnation)
        for old in lost:
            del self._workers[old.peer]
            self.index.forget(old.incarnation)
            worker.breaker = old.breaker
        self._workers[peer] = worker
        self._examine(worker)
        return Heard(worker, needs_answer=True, lost=lost)

    def _examine(self, worker: Worker) -> bool:
        """Make the worker ready or refused; whether that is news."""
        before = worker.state, worker.reason
        worker.reason = self._objection(worker)
        worker.state = "refused" if worker.reason else "ready"
        is_news = (worker.state, worker.reason) != before
        if worker.state == "ready":
            logger.info("%s worker %s (%s) is ready", worker.role, worker.name, worker.incarnation)
            self._expects_prefill = self._expects_prefill or worker.role == "prefill"
        elif is_news:
            logger.error("%s worker %s is refused: %s", worker.role, worker.name, worker.reason)
        return is_news

    def touch(self, peer: Peer) -> None:
        """The worker has said something else: it is not silent, even if its Status waits behind other
        messages."""
        worker = self._workers.get(peer)
        if worker is not None and worker.state == "ready":
            worker.spoke_at = time.monotonic()

    def forget(self, peer: Peer, reason: str) -> Worker | None:
        """The session is over."""
        worker = self._workers.pop(peer, None)
        if worker is not None:
            self.index.forget(worker.incarnation)
            if worker.draining and not worker.charges:
                logger.info("%s worker %s has drained and left", worker.role, worker.name)
            else:
                logger.warning("%s worker %s is lost: %s", worker.role, worker.name, reason)
        return worker

    def remove(self, worker: Worker) -> None:
        """It gets no work any more. The caller tells it, and voids its requests."""
        self._removed.add(worker.incarnation)
        self.index.forget(worker.incarnation)
        worker.settle_all()
        self._examine(worker)

    def sweep(self) -> list[Worker]:
        """Find the workers that have fallen silent; call it every ``PING_INTERVAL_S``."""
        now = time.monotonic()
        stalled = now - self._swept_at > 2 * PING_INTERVAL_S
        self._swept_at = now
        if stalled:  # this process stood still: what the workers said meanwhile is not read yet
            return []
        quiet = [w for w in self if now - max(w.heard_at, w.spoke_at) > self._dead_after_s]
        for worker in quiet:
            if worker.state == "refused":
                del self._workers[worker.peer]
        silent = [w for w in quiet if w.state == "ready"]
        for worker in silent:
            worker.state = "silent"
            worker.settle_all()
            logger.warning("%s worker %s is silent", worker.role, worker.name)
        return silent

    def charge(self, worker: Worker, request_id: str, num_tokens: int, num_to_compute: int) -> None:
        """An attempt begins: the worker needs room for so many tokens, and has yet to compute some."""
        self._num_dispatched += 1
        worker.last_used = self._num_dispatched
        worker.charge(request_id, Charge(num_tokens, num_to_compute, time.monotonic()))
        worker.breaker.dispatched(request_id)

    def settle(self, worker: Worker, request_id: str) -> None:
        worker.settle(request_id)
        worker.breaker.settled(request_id)

    def snapshot(self) -> Snapshot:
        now = time.monotonic()
        taking = [(w.status.role, w.candidate(now)) for w in self._workers.values() if w.takes_work]
        prefill = [candidate for role, candidate in taking if role == "prefill"]
        decode = [candidate for role, candidate in taking if role == "decode"]
        fleet = fleet_of(prefill, decode)
        return Snapshot(prefill, decode, self._expects_prefill, self._allows_fallback, fleet)

    def hear_blocks(self, peer: Peer, news: BlocksStored | BlocksRemoved) -> None:
        """What a worker's prefix cache holds. Those that are refused are not listened to: they tell it again
        when they are welcome."""
        worker = self._workers.get(peer)
        if worker is None or worker.state == "refused":
            return
        worker.spoke_at = time.monotonic()
        if isinstance(news, BlocksRemoved):
            self.index.remove(worker.incarnation, news.block_hashes)
            return
        if news.is_first:
            self.index.forget(worker.incarnation)
        self.index.store(worker.incarnation, news.block_hashes)

    def block_naming(self) -> tuple[str, int] | None:
        """Fingerprint and block size that the names of blocks follow from; None while no worker is ready."""
        worker = next((w for w in self if w.state == "ready"), None)
        if worker is None:
            return None
        return worker.status.model.fingerprint, worker.status.layout.block_size

    def longest_sequence(self, role: Role) -> int | None:
        """The longest sequence that a worker of the role can hold; None when that is not known."""
        limits = [w.status.max_sequence_tokens for w in self if w.role == role and w.state != "refused"]
        return max(limits) if limits and 0 not in limits else None

    def max_model_len(self) -> int | None:
        return min((w.status.model.max_model_len for w in self if w.state != "refused"), default=None)

    def _objection(self, worker: Worker) -> str:
        """Why the worker cannot work with this proxy or with the other workers; empty when it can."""
        status = worker.status
        if worker.incarnation in self._removed:
            return "removed by DELETE /workers"
        if status.layout.block_size < 1 or status.model.max_model_len < 1:
            return f"block_size: {status.layout.block_size}, max_model_len: {status.model.max_model_len}"
        if self._fingerprint and status.model.fingerprint != self._fingerprint:
            return f"model_fingerprint: {self._fingerprint!r} here, {status.model.fingerprint!r} there"
        oldest = next((w for w in self if w is not worker and w.state == "ready"), None)
        difference = oldest and oldest.status.layout.difference(status.layout)
        return f"{difference} (compared with {oldest.name})" if oldest and difference else ""
