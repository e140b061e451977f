"""The life of a request, from prompt to last token.

    waiting      for a pair of workers: a first attempt not at all, a later one for a bounded time
    dispatched   tokens come in (``proxy.attempt``)
    again        the attempt failed and another may succeed: prompt plus the tokens so far, attempt + 1, a
                 pair chosen anew that leaves out whom the failure speaks against
    ended        with a finish reason, or with RequestFailed

Sampling goes by (seed, position), so what another attempt adds is what the failed one would have added.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from common.hashing import known_and_further, root_hash
from common.messages import DecodeTarget, Generate, Sampling, TokenLogprob, WorkerError
from proxy.attempt import Attempt, AttemptFailed
from proxy.cost import Prediction
from proxy.index import BlockIndex, Overlap
from proxy.record import Route
from proxy.router import MAX_BLAME, Choice, Need, Targets

NO_TARGETS = Targets()
NOT_IN_HEADERS = re.compile("[^ -~]")
RETRY_PAUSE_S = 0.2  # before a pair that has just failed is tried again; doubles
MAX_FAILED_HANDOVERS = (
    2  # then a decode worker does both halves, if it may: what is not moved cannot get lost
)


class RequestFailed(Exception):
    """The request has ended without its reply."""

    def __init__(self, error: WorkerError, retry_after_s: int = 1) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class Request:
    """One sequence asked for. ``token_ids`` is the prompt."""

    id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    deadline: float  # loop.time()
    priority: int = 0
    cache_salt: str = ""
    trace: str = ""
    output: list[int] = field(default_factory=list)
    num_cached_tokens: int = (
        0  # prompt tokens that needed no computing, by the attempt that gave the first token
    )
    attempt: Attempt | None = None  # the latest
    routes: list[Route] = field(default_factory=list)  # of all attempts
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_attempts: int = 0
    dispatched_at: float = 0.0  # time.monotonic(), of the first attempt
    blame: Counter[str] = field(default_factory=Counter)  # by incarnation
    session: str = ""
    targets: Targets = NO_TARGETS
    prediction: Prediction | None = None  # of the latest attempt
    _block_hashes: list[bytes] = field(default_factory=list)  # of the prompt, as far as anybody has asked
    failed_pairs: Counter[Choice] = field(default_factory=Counter)
    overloaded_pairs: set[Choice] = field(default_factory=set)
    num_failed_handovers: int = 0

    @property
    def num_prompt_logprobs(self) -> int:
        """How many there will be; the first token has none."""
        return len(self.token_ids) - 1 if self.sampling.num_prompt_logprobs is not None else 0

    def need(self, overlap: Overlap, draws: tuple[float, float]) -> Need:
        """``draws``: random numbers in [0, 1)."""
        # What is known of a prompt besides its blocks is not handed over.
        wants_prompt = self.sampling.num_prompt_logprobs is not None
        return Need(
            num_tokens=len(self.token_ids) + len(self.output),
            max_total_tokens=len(self.token_ids) + self.sampling.max_tokens,
            blame=self.blame,
            hands_over=self.num_failed_handovers < MAX_FAILED_HANDOVERS and not wants_prompt,
            overlap=overlap,
            session=self.session,
            draws=draws,
            targets=self.targets,
        )

    def route_text(self) -> str:
        """The latest attempt's workers and what was predicted of them, for a header; empty: none yet."""
        if not self.routes or self.prediction is None:
            return ""
        route, told = self.routes[-1], self.prediction
        text = (
            f"{route.path} prefill={route.prefill or '-'} decode={route.decode} "
            f"ttft_s={told.ttft_s:.4f} cost_s={told.cost_s:.4f} "
            f"cached={told.num_cached}/{len(self.token_ids)} attempt={self.num_attempts}"
        )
        return text if text.isascii() and text.isprintable() else NOT_IN_HEADERS.sub("?", text)

    def overlap(self, index: BlockIndex, fingerprint: str, block_size: int) -> Overlap:
        """Who holds how much of the prompt."""
        if self.sampling.num_prompt_logprobs is not None:
            return {}  # all of it will be computed
        root = root_hash(fingerprint, self.cache_salt)
        tokens = (*self.token_ids, *self.output) if self.output else self.token_ids
        return index.overlap(known_and_further(self._block_hashes, root, tokens, block_size))

    def generate_message(self, proxy: str, target: DecodeTarget | None, now: float) -> Generate:
        return Generate(
            request_id=self.id,
            attempt=self.num_attempts,
            token_ids=(*self.token_ids, *self.output),
            num_prompt_tokens=len(self.token_ids),
            proxy=proxy,
            sampling=self.sampling,
            decode=target,
            deadline_s=max(0.001, self.deadline - now),
            priority=self.priority,
            cache_salt=self.cache_salt,
            trace=self.trace,
        )

    def learn(self, attempt: Attempt) -> None:
        """What an attempt tells besides tokens."""
        self.prompt_logprobs = self.prompt_logprobs or attempt.prompt_logprobs
        if not self.output:
            self.num_cached_tokens = min(attempt.num_cached_tokens, len(self.token_ids))

    def note_failure(self, attempt: Attempt, failure: AttemptFailed) -> None:
        """Remember whom to avoid. One culprit is left out as long as there is another; where it is one of
        two, both get a second chance with somebody else."""
        share = MAX_BLAME // len(failure.culprits) if failure.culprits else 0
        for worker in failure.culprits:
            self.blame[worker.incarnation] += share
        if attempt.prefill in failure.culprits and failure.error.code == "peer_lost":
            self.num_failed_handovers += 1
        self.routes[-1] = self.routes[-1]._replace(error=failure.error.code)
        pair = choice_of(attempt)
        self.failed_pairs[pair] += 1
        if failure.error.code == "overloaded":
            self.overloaded_pairs.add(pair)

    def has_overloaded(self, choice: Choice) -> bool:
        """Whether it is time to give up. A decode worker does not stand in for prefill workers that are
        merely busy: that would only carry the overload on to the streams under way."""
        return bool(self.overloaded_pairs) and (
            choice.fallback or choice._replace(fallback=False) in self.overloaded_pairs
        )

    def pause_before(self, choice: Choice) -> float:
        """Seconds to wait before the choice: none, unless the same pair has failed this request before."""
        num_failures = self.failed_pairs[choice._replace(fallback=False)]
        return RETRY_PAUSE_S * 2 ** (num_failures - 1) if num_failures else 0.0


def choice_of(attempt: Attempt) -> Choice:
    return Choice(attempt.prefill.incarnation if attempt.prefill else None, attempt.decode.incarnation)


def route_of(attempt: Attempt, choice: Choice) -> Route:
    path = "fallback" if choice.fallback else "disaggregated" if attempt.prefill else "colocated"
    return Route(attempt.prefill.name if attempt.prefill else None, attempt.decode.name, path)
