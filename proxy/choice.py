"""One sequence of a reply, from its request's tokens to pieces of text."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple

from common.messages import WorkerError
from proxy.frontend import Frontend
from proxy.job import Job
from proxy.metrics import Metrics
from proxy.request import Request, RequestFailed
from proxy.text import Detokenized, Piece


class Part(NamedTuple):
    choice: "Choice"
    piece: Piece


@dataclass(slots=True, eq=False)
class Choice:
    index: int
    request: Request
    text: Detokenized
    arrived_at: float  # time.monotonic()
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @classmethod
    def of(cls, job: Job, index: int, frontend: Frontend, arrived_at: float, deadline: float) -> "Choice":
        request = Request(
            id=uuid.uuid4().hex,  # never the client's: it would choose what other parties must keep apart
            token_ids=job.prompt_of(index).token_ids,
            sampling=job.sampling_of(index),
            deadline=deadline,
            priority=job.priority,
            cache_salt=job.cache_salt,
            trace=job.trace,
        )
        return cls(index, request, Detokenized(frontend.model.tokenizer, job), arrived_at)

    async def parts(self, frontend: Frontend) -> AsyncGenerator[Part, None]:
        """Ends with a piece that has a finish reason; raises RequestFailed."""
        metrics = frontend.metrics
        async with contextlib.aclosing(frontend.dispatcher.tokens(self.request)) as batches:
            async for batch in batches:
                piece = self.text.push(batch)
                self._note_time(metrics)
                if piece is None:
                    continue
                if piece.finish_reason is not None:
                    self._note_end(metrics, piece.finish_reason)
                    self._check_prompt()
                yield Part(self, piece)
                if piece.finish_reason is not None:
                    return

    def _check_prompt(self) -> None:
        """Raises RequestFailed rather than tell less than was asked for."""
        if len(self.request.prompt_logprobs) != self.request.num_prompt_logprobs:
            raise RequestFailed(WorkerError("internal", "the log-probabilities of the prompt got lost"))

    def timings(self) -> dict[str, float]:
        """Seconds by name: the workers' own, and what the client saw from here."""
        return self.request.timings | {
            "route_s": self.request.dispatched_at - self.arrived_at,
            "time_to_first_token_s": self.first_token_at - self.arrived_at,
            "total_s": self.last_token_at - self.arrived_at,
            "num_attempts": self.request.num_attempts,
        }

    def _note_time(self, metrics: Metrics) -> None:
        now = time.monotonic()
        if self.first_token_at:
            metrics.itl.observe(now - self.last_token_at)
        else:
            self.first_token_at = now
            metrics.ttft.observe(now - self.arrived_at)
        self.last_token_at = now

    def _note_end(self, metrics: Metrics, finish_reason: str) -> None:
        metrics.finished.labels(finish_reason).inc()
        metrics.e2e.observe(self.last_token_at - self.arrived_at)
        metrics.generation_tokens.inc(self.text.num_tokens)
        metrics.output_sizes.observe(self.text.num_tokens)
        metrics.cached_tokens.inc(self.request.num_cached_tokens)
