"""What is remembered of a request that has ended: its route, and where its time went.

The segments of a waterfall follow each other without gaps, from arrival to the last token, on this proxy's
clock:

    route     reading, tokenizing, choosing workers
    retry     attempts that failed
    queue     until the first step with tokens of it began; what messages took on their way is here, too
    prefill   until its first token was sampled
    transfer  the part of the hand-over that prefill did not hide
    wait      until the decode worker's first step of it
    decode    until the last token

Requests that ended without a token have those that they came to.
"""

from typing import NamedTuple

Json = dict[str, object]


class Route(NamedTuple):
    """One attempt."""

    prefill: str | None  # names of workers; None: the decode worker does both halves
    decode: str
    path: str  # disaggregated, colocated, or fallback: no prefill worker, though there should be one
    error: str | None = None  # code, of an attempt that failed


class Segment(NamedTuple):
    name: str
    start_s: float  # after arrival
    seconds: float


class Record(NamedTuple):
    id: str  # as in this proxy's and the workers' logs
    trace_id: str  # empty: not traced
    arrived_at: float  # time.monotonic()
    outcome: str  # finish reason; "error", or "abort" where the client has left
    error: str | None  # code
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    tpot_s: float | None  # mean time of a token after the first
    total_s: float
    good: bool  # finished within the targets
    routes: tuple[Route, ...]
    segments: tuple[Segment, ...]
    split: dict[str, float]  # of ``total_s``, see proxy/split.py

    def to_json(self, now: float) -> Json:
        return {
            "id": self.id,
            "trace_id": self.trace_id or None,
            "arrived_s_ago": round(now - self.arrived_at, 3),
            "outcome": self.outcome,
            "error": self.error,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "total_s": self.total_s,
            "good": self.good,
            "routes": [route._asdict() for route in self.routes],
            "segments": [segment._asdict() for segment in self.segments],
            "split": self.split,
        }
