"""One sequence of a reply, from its request's tokens to pieces of text."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple

from common.messages import WorkerError
from proxy.frontend import Frontend
from proxy.job import Job
from proxy.observer import Observer
from proxy.record import Record
from proxy.request import Request, RequestFailed
from proxy.spans import RequestSpan
from proxy.split import segments_of, split_of
from proxy.text import Detokenized, Piece
from proxy.trace import trace_id_of


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
    span: RequestSpan | None = None  # where traces are wanted
    tells_workers: bool = False
    _attempt: tuple[int, int] = (0, 0)  # number of the latest; how many tokens there were before it

    @classmethod
    def of(cls, job: Job, index: int, frontend: Frontend, arrived_at: float, deadline: float) -> "Choice":
        tracer = frontend.observer.tracer
        span = RequestSpan(tracer, job.trace, arrived_at) if tracer is not None else None
        request = Request(
            id=secrets.token_hex(
                16
            ),  # never the client's: it would choose what other parties must keep apart
            token_ids=job.prompt_of(index).token_ids,
            sampling=job.sampling_of(index),
            deadline=deadline,
            priority=job.priority,
            cache_salt=job.cache_salt,
            trace=span.traceparent if span is not None else job.trace,
            session=job.caller.session,
            targets=job.caller.targets,
        )
        text = Detokenized(frontend.model.tokenizer, job)
        return cls(index, request, text, arrived_at, span=span, tells_workers=job.return_workers)

    async def parts(self, frontend: Frontend) -> AsyncGenerator[Part, None]:
        """Ends with a piece that has a finish reason; raises RequestFailed."""
        outcome, error = "abort", None
        try:
            async with contextlib.aclosing(frontend.dispatcher.tokens(self.request)) as batches:
                async for batch in batches:
                    if self._attempt[0] != self.request.num_attempts:
                        self._attempt = (self.request.num_attempts, self.text.num_tokens)
                    piece = self.text.push(batch)
                    self._note_tokens(frontend.observer, len(batch.token_ids))
                    if piece is None:
                        continue
                    if self.tells_workers:
                        piece.worker = self._sampler()
                    if piece.finish_reason is not None:
                        self._check_prompt()
                        outcome = piece.finish_reason
                    yield Part(self, piece)
                    if piece.finish_reason is not None:
                        return
        except RequestFailed as failure:
            outcome, error = "error", failure.error.code
            raise
        finally:
            record = self._record(frontend.observer, outcome, error)
            frontend.observer.note_end(record, time.monotonic())
            if self.span is not None:
                self.span.end(record, self.request.attempt)

    def _sampler(self) -> str:
        """Who sampled the latest token: in each attempt the prefill worker samples the first, the decode
        worker all others."""
        attempt = self.request.attempt
        if attempt is None:
            return ""
        is_first = self.text.num_tokens - self._attempt[1] <= 1
        return (attempt.prefill if attempt.prefill and is_first else attempt.decode).name

    def _check_prompt(self) -> None:
        """Raises RequestFailed rather than tell less than was asked for."""
        if len(self.request.prompt_logprobs) != self.request.num_prompt_logprobs:
            raise RequestFailed(WorkerError("internal", "the log-probabilities of the prompt got lost"))

    def timings(self) -> dict[str, float]:
        """Seconds by name: the workers' own, what the client saw from here, and what the latter consists
        of."""
        told = self.request.attempt.timings if self.request.attempt else {}
        return (
            told
            | {
                "route_s": self.request.dispatched_at - self.arrived_at,
                "time_to_first_token_s": self.first_token_at - self.arrived_at,
                "total_s": self.last_token_at - self.arrived_at,
                "num_attempts": self.request.num_attempts,
            }
            | split_of(self.request, self.arrived_at, self.last_token_at)
        )

    def _note_tokens(self, observer: Observer, num_tokens: int) -> None:
        now = time.monotonic()
        if self.first_token_at:
            observer.note_tokens(now - self.last_token_at, num_tokens, now)
        else:
            self.first_token_at = now  # which the client is to have before it is counted
            loop = asyncio.get_running_loop()
            loop.call_soon(observer.note_first_token, now - self.arrived_at, num_tokens, now)
        self.last_token_at = now

    def _record(self, observer: Observer, outcome: str, error: str | None) -> Record:
        request, num_tokens = self.request, self.text.num_tokens
        is_whole = outcome not in ("abort", "error")
        ended_at = self.last_token_at if is_whole else time.monotonic()
        ttft_s = self.first_token_at - self.arrived_at if self.first_token_at else None
        tpot_s = (self.last_token_at - self.first_token_at) / (num_tokens - 1) if num_tokens > 1 else None
        return Record(
            id=request.id,
            trace_id=trace_id_of(request.trace),
            arrived_at=self.arrived_at,
            outcome=outcome,
            error=error,
            num_prompt_tokens=len(request.token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=num_tokens,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            total_s=ended_at - self.arrived_at,
            good=is_whole and observer.is_good(ttft_s, tpot_s),
            routes=tuple(request.routes),
            segments=segments_of(request, self.arrived_at, ended_at),
            split=split_of(request, self.arrived_at, ended_at),
        )
