"""Spans of requests for OpenTelemetry, made when their times are known.

Nothing here runs, and OpenTelemetry's SDK is not loaded, without ``--otlp-endpoint``: then ``tracer_of``
gives None. Which trace a span belongs to is told by ``traceparent`` (W3C Trace Context): by the client to the
proxy, by the proxy to workers in ``Generate.trace``.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from common import timings
from common.config import ConfigError, TraceConfig
from common.sequence import Sequence

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

EXPORT_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 3.0  # for a receiver that does not answer

Attributes = Mapping[str, str | int | float | bool]


def tracer_of(config: TraceConfig, service: str, name: str) -> "Tracer | None":
    """Raises ConfigError where the packages are missing."""
    if not config.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        text = f"--otlp-endpoint: {error}; install the traces extra: pip install 'baton-serve[traces]'"
        raise ConfigError(text) from error
    resource = Resource.create({"service.name": f"baton-{service}", "service.instance.id": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    endpoint = f"{config.otlp_endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000 * EXPORT_INTERVAL_S))
    return Tracer(provider)


class Tracer:
    """Times are of ``time.monotonic()``."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("baton")

    def begin(self, name: str, traceparent: str, at: float) -> "Span":
        """A span under the one that ``traceparent`` names; of a new trace where it names none."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        return self._tracer.start_span(name, parent, start_time=_wall_ns(at))

    def note(self, sequence: Sequence, worker: str, outcome: str) -> None:
        """The span of a sequence that has ended here, or was taken over elsewhere."""
        marks = sequence.marks
        if not sequence.trace or timings.FINISHED not in marks:
            return
        adopted = timings.ADOPTED in marks
        name = "decode" if adopted else "prefill" if sequence.handoff else "generate"
        span = self.begin(name, sequence.trace, marks[timings.ADOPTED if adopted else timings.QUEUED])
        attributes: Attributes = {
            "baton.worker": worker,
            "baton.request_id": sequence.key.request_id,
            "baton.attempt": sequence.key.attempt,
            "baton.outcome": outcome,
            "baton.prompt_tokens": sequence.num_prompt_tokens,
            "baton.cached_tokens": sequence.num_cached_tokens,
            "baton.output_tokens": sequence.num_output_tokens,
            "baton.kernel_s": sequence.prefill_cost.kernel_s + sequence.decode_cost.kernel_s,
            "baton.cache_s": sequence.prefill_cost.cache_s + sequence.decode_cost.cache_s,
        }
        self.end(span, marks[timings.FINISHED], attributes, marks, failed=outcome == "error")

    def end(
        self,
        span: "Span",
        at: float,
        attributes: Attributes,
        events: Mapping[str, float],
        failed: bool = False,
    ) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attributes(attributes)
        ended_ns = _wall_ns(at)  # the only look at the clock: events a microsecond apart stay in order
        for name, when in sorted(events.items(), key=lambda event: event[1]):
            span.add_event(name, timestamp=ended_ns - round((at - when) * 1e9))
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(ended_ns)

    def close(self) -> None:
        """Send what is left; takes no longer than a receiver that does not answer is waited for."""
        self._provider.shutdown()


def traceparent_of(span: "Span") -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _wall_ns(at: float) -> int:
    return time.time_ns() + round((at - time.monotonic()) * 1e9)
