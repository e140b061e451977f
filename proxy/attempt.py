"""One dispatch of a request to a pair of workers, or to a decode worker alone.

    dispatched   the first worker owns it: what that one says counts
    handed over  the decode worker has spoken; it told the first token once more, so that nothing depends on
                 which of the two was heard first. What the prefill worker says from here on, errors included,
                 is void
    ended        by a finish reason, by a failure, or by the request's side

Messages put themselves in order by ``Tokens.start``: what is known already is dropped, what is ahead waits,
for a bounded time, for what is missing.
"""

import asyncio
import time
from dataclasses import dataclass, field

from common.channel import Peer
from common.messages import FinishReason, TokenLogprob, Tokens, WorkerError
from proxy.worker import Worker

GAP_TIMEOUT_S = 2.0
MAX_HELD_MESSAGES = 64
OUT_OF_TIME = WorkerError("deadline", "the request's time is up")


class AttemptFailed(Exception):
    def __init__(self, error: WorkerError, culprits: tuple[Worker, ...] = ()) -> None:
        super().__init__(error.message)
        self.error = error
        self.culprits = culprits  # workers that may be at fault


@dataclass(slots=True)
class Batch:
    """Output tokens in order, as many as had arrived."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    request_id: str
    number: int
    prefill: Worker | None
    decode: Worker
    num_known: int  # output tokens of the request that are known
    deadline: float  # loop.time()
    wants_logprobs: bool = False
    num_prompt_logprobs: int = 0  # entries that the first output must come with
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    began_at: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0  # time.monotonic(), of the first one that is new; 0: none yet
    handed_over_at: float = 0.0  # when the decode worker first spoke
    failure: AttemptFailed | None = None
    finished: bool = False
    handed_over: bool = False
    _batch: Batch = field(default_factory=Batch)
    _held: dict[int, Tokens] = field(default_factory=dict)  # ahead of a gap, by start
    _waiter: asyncio.Future[None] | None = None  # whoever wants the next tokens
    _timer: asyncio.TimerHandle | None = None  # of the deadline, or of an open gap

    def __post_init__(self) -> None:
        self._set_timer(self.deadline, OUT_OF_TIME)

    @property
    def owner(self) -> Worker:
        return self.decode if self.handed_over or self.prefill is None else self.prefill

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def over(self) -> bool:
        return self.finished or self.failure is not None

    def exposed_s(self, ended_at: float) -> float:
        """From the first token to the hand-over, as far as it came until ``ended_at``."""
        if self.prefill is None or not self.first_token_at:
            return 0.0
        return max(0.0, (self.handed_over_at or ended_at) - self.first_token_at)

    async def next(self) -> Batch:
        """The tokens that have arrived since the last call, waiting for some; raises AttemptFailed."""
        while True:
            batch = self._batch
            if batch.token_ids or batch.finish_reason:
                self._batch = Batch()
                return batch
            if self.failure is not None:
                raise self.failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def receive(self, peer: Peer, tokens: Tokens) -> bool:
        """Take in what a worker says about this attempt; False when it is void."""
        by_decode = peer == self.decode.peer
        if self.over or not (by_decode or peer == self.owner.peer):
            return self._learn_late(peer, tokens)
        if tokens.error is not None or tokens.finish_reason in ("error", "abort"):
            error = tokens.error or WorkerError("peer_lost", "the worker gave the request up")
            self.fail(error, self._culprits(error, by_decode))
        elif objection := self._objection(by_decode, tokens):
            self.fail(WorkerError("internal", objection), (self.decode if by_decode else self.owner,))
        else:
            self._note(by_decode, tokens)
            self._put_in_order(tokens)
        return True

    def _objection(self, by_decode: bool, tokens: Tokens) -> str:
        """What is wrong with a message; empty: nothing."""
        if len(tokens.logprobs) != (len(tokens.token_ids) if self.wants_logprobs else 0):
            return f"{len(tokens.logprobs)} log-probabilities for {len(tokens.token_ids)} tokens"
        is_first = tokens.start == 0 and bool(tokens.token_ids) and not (by_decode and self.prefill)
        if is_first and len(tokens.prompt_logprobs) != self.num_prompt_logprobs:
            told, wanted = len(tokens.prompt_logprobs), self.num_prompt_logprobs
            return f"{told} log-probabilities of the prompt instead of {wanted}"
        return ""

    def _learn_late(self, peer: Peer, tokens: Tokens) -> bool:
        """How long the hand-over took is known to the prefill worker only, once it is over."""
        handed_over = self.prefill is not None and peer == self.prefill.peer and self.handed_over
        if not handed_over or tokens.token_ids or tokens.finish_reason is not None:
            return False
        self.timings |= tokens.timings
        return True

    def lose(self, peer: Peer) -> None:
        """A worker's session is over. Only the loss of one that is still needed is a failure."""
        if peer == self.decode.peer:
            self.fail(WorkerError("peer_lost", f"decode worker {self.decode.name} is lost"), (self.decode,))
        elif peer == self.owner.peer:
            self.fail(WorkerError("peer_lost", f"prefill worker {self.owner.name} is lost"), (self.owner,))

    def fail(self, error: WorkerError, culprits: tuple[Worker, ...] = ()) -> None:
        """End the attempt; what has arrived in order before is still delivered."""
        if not self.over:
            self.failure = AttemptFailed(error, culprits)
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._held.clear()
        self._wake()

    def _culprits(self, error: WorkerError, by_decode: bool) -> tuple[Worker, ...]:
        """A prefill worker that cannot hand over may itself be at fault, or the other side may. What the
        decode worker has said to it speaks against the decode worker alone, unless it speaks of a peer."""
        if by_decode or self.prefill is None or (error.origin == "decode" and error.code != "peer_lost"):
            return (self.decode,)
        return self.workers if error.code in ("peer_lost", "overloaded") else (self.prefill,)

    def _note(self, by_decode: bool, tokens: Tokens) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, tokens.num_cached_tokens)
        if tokens.timings:
            self.timings |= tokens.timings
        if tokens.prompt_logprobs:
            self.prompt_logprobs = tokens.prompt_logprobs
        if self.prefill is None:
            self.decode.computed(self.request_id)
        if self.prefill is None or self.handed_over:
            return
        self.prefill.settle(self.request_id)  # the prompt is computed
        if by_decode:
            self.handed_over = True
            self.handed_over_at = time.monotonic()
            self.prefill.breaker.succeeded()

    def _put_in_order(self, tokens: Tokens) -> None:
        if tokens.start > self.num_known:
            self._hold(tokens)
            return
        self._append(tokens)
        had_gap = bool(self._held)
        while self._held and not self.over and (start := min(self._held)) <= self.num_known:
            self._append(self._held.pop(start))
        if had_gap and not self._held and not self.over:
            self._set_timer(self.deadline, OUT_OF_TIME)
        self._wake()

    def _append(self, tokens: Tokens) -> None:
        known = self.num_known - tokens.start
        new = tokens.token_ids[known:]
        batch = self._batch
        if new:
            self.first_token_at = self.first_token_at or time.monotonic()
            batch.token_ids.extend(new)
            self.num_known += len(new)
            if tokens.logprobs:
                batch.logprobs.extend(tokens.logprobs[known:])
        if tokens.finish_reason is not None and known <= len(tokens.token_ids):
            batch.finish_reason = tokens.finish_reason
            self.finished = True
            self.close()

    def _hold(self, tokens: Tokens) -> None:
        if len(self._held) >= MAX_HELD_MESSAGES:
            self.fail(WorkerError("internal", "too many messages ahead of a missing one"), (self.owner,))
            return
        if not self._held:
            when = min(self.deadline, asyncio.get_running_loop().time() + GAP_TIMEOUT_S)
            error = WorkerError("peer_lost", f"tokens {self.num_known} to {tokens.start} never came")
            self._set_timer(when, error, (self.owner,))
        self._held[tokens.start] = tokens

    def _set_timer(self, when: float, error: WorkerError, culprits: tuple[Worker, ...] = ()) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self.fail, error, culprits)
