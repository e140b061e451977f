"""Between requests and workers: who runs what, and who must hear of what.

Three tasks of the proxy's event loop live here: what workers say, pings and the watch for silence, and the
notice that a connection has ended. Requests do not have tasks of their own; ``tokens`` runs in the task of
whoever wants them.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator

from common.channel import PING_INTERVAL_S, Peer, Recent, SessionBroken, WorkerChannel
from common.messages import (
    Abort,
    BlocksRemoved,
    BlocksStored,
    DecodeTarget,
    Drain,
    Outputs,
    Ping,
    Refused,
    Status,
    Tokens,
    ToProxy,
    ToWorker,
    Welcome,
    WorkerError,
)
from proxy.attempt import OUT_OF_TIME, Attempt, AttemptFailed, Batch
from proxy.chooser import Chooser, Routed
from proxy.metrics import Metrics
from proxy.registry import Registry
from proxy.request import Request, RequestFailed, route_of
from proxy.router import Choice, Need
from proxy.worker import Worker

# While messages wait, receive returns at once: others get their turn after this many of them. The more there
# are, the more tokens share a chunk when this process is behind; when it is not, none ever wait.
MESSAGES_A_TURN = 16

logger = logging.getLogger(__name__)


class Dispatcher:
    def __init__(
        self,
        channel: WorkerChannel,
        registry: Registry,
        chooser: Chooser,
        metrics: Metrics,
        incarnation: str,
        max_attempts: int,
        worker_wait_s: float,
    ) -> None:
        self.registry = registry
        self.incarnation = incarnation
        self._channel = channel
        self._chooser = chooser
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._worker_wait_s = worker_wait_s
        self._attempts: dict[str, Attempt] = {}  # under way, by request id
        self._aborted_again = Recent()
        self._workers_changed = asyncio.Event()
        self._served_at = -math.inf  # loop.time(), when a request would last have been served

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._beat())
            tasks.create_task(self._watch_connections())

    async def tokens(self, request: Request) -> AsyncGenerator[Batch, None]:
        """The request's output, ending with a batch that has a finish reason; raises RequestFailed. Leaving
        early (close the iterator) aborts it on its workers."""
        while True:
            if len(request.output) >= request.sampling.max_tokens:  # the end was lost, not a token
                yield Batch(finish_reason="length")
                return
            attempt = await self._dispatch(request)
            try:
                while True:
                    batch = await attempt.next()
                    request.learn(attempt)
                    request.output.extend(batch.token_ids)
                    yield batch
                    if batch.finish_reason is not None:
                        return
            except AttemptFailed as failure:
                self._note_failure(request, attempt, failure)
            finally:
                self._end(attempt)

    def drain(self, worker: Worker) -> None:
        """Ask a ready worker to finish what it has and to end, and give it nothing more."""
        worker.draining = True
        self._tell(worker.peer, Drain())

    def remove(self, worker: Worker) -> None:
        """Have nothing to do with the worker any more; what it was doing is tried elsewhere."""
        self.registry.remove(worker)
        self._void(worker.peer)
        self._tell(worker.peer, Refused(worker.reason))

    # Requests to workers

    async def _dispatch(self, request: Request) -> Attempt:
        while True:
            routed = await self._choose(request)
            if pause_s := request.pause_before(routed.choice):
                await asyncio.sleep(min(pause_s, request.deadline - asyncio.get_running_loop().time()))
                routed = await self._choose(request)  # somebody better may have joined
            choice = routed.choice
            prefill = self.registry.worker(choice.prefill) if choice.prefill else None
            decode = self.registry.worker(choice.decode)
            if decode is None or (choice.prefill and prefill is None):
                continue
            first = prefill or decode
            target = DecodeTarget(decode.status.address, decode.incarnation) if prefill else None
            try:
                now = asyncio.get_running_loop().time()
                self._channel.send(first.peer, request.generate_message(self.incarnation, target, now))
            except ConnectionError as error:
                self._lose(first.peer, str(error))
                continue
            self._charge(request.id, prefill, decode, routed.need)
            request.prediction = self._chooser.predict(routed)  # while the worker is at it
            return self._begin(request, prefill, decode, choice)

    def _charge(self, request_id: str, prefill: Worker | None, decode: Worker, need: Need) -> None:
        """To whoever computes the prompt go the tokens that it does not hold."""
        for worker in (decode,) if prefill is None else (prefill, decode):
            computes = worker is prefill or prefill is None
            num_lacking = need.num_lacking(worker.candidate(time.monotonic())) if computes else 0
            self.registry.charge(worker, request_id, need.num_tokens, num_lacking)

    def _begin(self, request: Request, prefill: Worker | None, decode: Worker, choice: Choice) -> Attempt:
        attempt = Attempt(
            request_id=request.id,
            number=request.num_attempts,
            prefill=prefill,
            decode=decode,
            num_known=len(request.output),
            deadline=request.deadline,
            wants_logprobs=request.sampling.num_logprobs is not None,
            num_prompt_logprobs=request.num_prompt_logprobs if not request.output else 0,
        )
        route = route_of(attempt, choice)
        request.num_attempts += 1
        request.attempt = attempt
        request.routes.append(route)
        request.dispatched_at = request.dispatched_at or attempt.began_at
        self._attempts[request.id] = attempt
        self._metrics.attempts.labels(route.path).inc()
        return attempt

    async def _choose(self, request: Request) -> Routed:
        """Waits where workers may come back soon: for a later attempt, and for a first one while they have
        not been away for long. Raises RequestFailed."""
        loop = asyncio.get_running_loop()
        missed_since = loop.time() if request.num_attempts else self._served_at
        patience = min(request.deadline, missed_since + self._worker_wait_s)
        while True:
            if (routed := self._chooser.choose(request)) is not None:
                return routed
            left = patience - loop.time()
            none_is_large_enough = request.num_attempts == 0 and self.registry.serves
            if left <= 0 or none_is_large_enough:
                raise RequestFailed(self._no_workers(request, loop.time()))
            self._workers_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._workers_changed.wait()

    def _no_workers(self, request: Request, now: float) -> WorkerError:
        if now >= request.deadline:
            return OUT_OF_TIME
        missing = self.registry.missing_roles()
        what = " and no ".join(f"{role} worker" for role in missing) or "worker that can hold this request"
        return WorkerError("peer_lost", f"no {what} is available")

    def _note_failure(self, request: Request, attempt: Attempt, failure: AttemptFailed) -> None:
        error = failure.error
        request.note_failure(attempt, failure)
        if error.code in ("peer_lost", "internal"):
            for worker in failure.culprits:
                worker.breaker.failed(request.id, time.monotonic())
        if error.code == "draining":
            for worker in failure.culprits:
                worker.draining = True
        if not error.retryable or request.num_attempts >= self._max_attempts:
            raise RequestFailed(error) from failure
        logger.info("request %s, attempt %d: %s; trying again", request.id, attempt.number, error.message)
        self._metrics.retried(error.code)

    def _end(self, attempt: Attempt) -> None:
        """Leave nothing behind, here or on the workers."""
        attempt.close()
        del self._attempts[attempt.request_id]
        for worker in attempt.workers:
            self.registry.settle(worker, attempt.request_id)
            if not attempt.finished:
                self._tell(worker.peer, Abort(attempt.request_id, attempt.number))
        if attempt.finished:
            attempt.owner.breaker.succeeded()

    def _tell(self, peer: Peer, message: ToWorker) -> None:
        """Send to a worker that may be gone; if it is, everything of ours on it is void anyway."""
        worker = self.registry.find(peer)
        if worker is None or worker.state == "silent":
            return
        try:
            self._channel.send(peer, message)
        except ConnectionError as error:
            self._lose(peer, str(error))

    # Workers to requests

    async def _listen(self) -> None:
        for number in itertools.count(1):
            try:
                self._hear(*await self._channel.receive())
            except SessionBroken as broken:
                # Its next Status opens another session, which tells the worker that this one was void.
                self._lose(broken.peer, str(broken))
            if number % MESSAGES_A_TURN == 0:
                await asyncio.sleep(0)

    def _hear(self, peer: Peer, message: ToProxy) -> None:
        match message:
            case Outputs(tokens=outputs):
                self.registry.touch(peer)
                for tokens in outputs:
                    self._hear_tokens(peer, tokens)
            case Status():
                self._hear_status(peer, message)
            case BlocksStored() | BlocksRemoved():
                self.registry.hear_blocks(peer, message)

    def _hear_tokens(self, peer: Peer, tokens: Tokens) -> None:
        attempt = self._attempts.get(tokens.request_id)
        if attempt is not None and attempt.number == tokens.attempt:
            if not attempt.receive(peer, tokens):
                self._metrics.void_outputs.inc()
            return
        self._metrics.void_outputs.inc()
        stray = (peer, tokens.request_id, tokens.attempt)
        if tokens.finish_reason is None and stray not in self._aborted_again:
            # The Abort may have overtaken the hand-over that it should have stopped.
            self._aborted_again.add(stray)
            self._tell(peer, Abort(tokens.request_id, tokens.attempt))

    def _hear_status(self, peer: Peer, status: Status) -> None:
        heard = self.registry.hear(peer, status)
        for worker in heard.lost:
            self._void(worker.peer)
        if heard.needs_answer:
            reason = heard.worker.reason
            self._tell(peer, Refused(reason) if reason else Welcome(self.incarnation))
            self._workers_changed.set()
            self._note_serving()

    def _note_serving(self) -> None:
        if self.registry.serves:
            self._served_at = asyncio.get_running_loop().time()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            for worker in self.registry.sweep():
                self._void(worker.peer)
            self._note_serving()
            self.registry.index.sweep()
            self._ping([worker.peer for worker in self.registry if worker.state != "silent"])

    async def _watch_connections(self) -> None:
        while True:
            await self._channel.disconnected()
            self._ping([worker.peer for worker in self.registry])

    def _ping(self, peers: list[Peer]) -> None:
        for peer in peers:
            try:
                self._channel.send(peer, Ping(self.incarnation))
            except ConnectionError as error:
                self._lose(peer, str(error))

    def _lose(self, peer: Peer, reason: str) -> None:
        self.registry.forget(peer, reason)
        self._void(peer)

    def _void(self, peer: Peer) -> None:
        """The session is over, and with it all that ran on it."""
        for attempt in list(self._attempts.values()):
            attempt.lose(peer)
