"""What a trace tells of a request: the proxy's span of each sequence, under which its workers' spans hang."""

from typing import TYPE_CHECKING

from common.tracing import Attributes, Tracer, traceparent_of
from proxy.attempt import Attempt
from proxy.record import Record

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RequestSpan:
    """``traceparent`` is for the workers, and for the client to find the trace by."""

    def __init__(self, tracer: Tracer, traceparent: str, arrived_at: float) -> None:
        self._tracer = tracer
        self._span: Span = tracer.begin("request", traceparent, arrived_at)
        self.traceparent = traceparent_of(self._span)

    def end(self, record: Record, attempt: Attempt | None) -> None:
        ended_at = record.arrived_at + record.total_s
        self._tracer.end(
            self._span, ended_at, _attributes(record), _events(attempt), failed=record.outcome == "error"
        )


def _attributes(record: Record) -> Attributes:
    told: dict[str, str | int | float | bool] = {
        "baton.request_id": record.id,
        "baton.outcome": record.outcome,
        "baton.good": record.good,
        "baton.cached_tokens": record.num_cached_tokens,
        "baton.num_attempts": len(record.routes),
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
    }
    told |= {f"baton.{name}": seconds for name, seconds in record.split.items()}
    told |= {f"baton.segment.{name}_s": seconds for name, _, seconds in record.segments}
    if record.error is not None:
        told["error.type"] = record.error
    if record.routes:
        route = record.routes[-1]
        told |= {"baton.path": route.path, "baton.prefill": route.prefill or "", "baton.decode": route.decode}
    return told


def _events(attempt: Attempt | None) -> dict[str, float]:
    """Of the latest attempt, by the proxy's clock."""
    if attempt is None:
        return {}
    marks = {
        "dispatched": attempt.began_at,
        "first_token": attempt.first_token_at,
        "handed_over": attempt.handed_over_at,
    }
    return {name: at for name, at in marks.items() if at}
