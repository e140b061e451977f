"""What this proxy counts, and what its workers report, for Prometheus. Names follow ``vllm:*`` with our
prefix, in seconds and bytes; docs/metrics.md has all of them."""

from collections import Counter as Counts
from collections.abc import Iterable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family

from common.exposition import Labelled, families
from common.metrics import PREFIX, WAIT_BUCKETS, WORKER_LABELS, Kind, Metric
from proxy.aliases import aliased
from proxy.record import Record
from proxy.registry import Registry

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (1.0, 8.0, 32.0, 128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 131072.0)

SEGMENT_METRICS = {
    "route": "request_route_time_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "transfer": "request_transfer_time_seconds",
    "wait": "request_decode_wait_time_seconds",
    "decode": "request_decode_time_seconds",
}


def _metric(
    kind: Kind, name: str, text: str, *labels: str, buckets: tuple[float, ...] = (), vllm: str = ""
) -> Metric:
    return Metric("", name, kind, text, labels, buckets, vllm)


def _histogram(name: str, text: str, buckets: tuple[float, ...], in_vllm: bool = True) -> Metric:
    return Metric("", name, "histogram", text, (), buckets, name if in_vllm else "")


WORKER_UP = _metric("gauge", "worker_up", "Whether the worker takes work", *WORKER_LABELS)

PROXY_METRICS = (
    _metric("counter", "requests", "HTTP requests by how they ended", "outcome"),
    _metric("counter", "requests_refused", "Requests refused before any worker heard of them", "reason"),
    _metric(
        "counter", "request_success", "Sequences by finish reason", "finished_reason", vllm="request_success"
    ),
    _metric("counter", "request_failures", "Sequences that ended with an error", "reason"),
    _metric("counter", "request_aborts", "Sequences whose client left"),
    _metric("counter", "requests_good", "Sequences that finished within --slo-ttft-s and --slo-itl-s"),
    _metric("counter", "prompt_tokens", "Prompt tokens of requests", vllm="prompt_tokens"),
    _metric("counter", "prompt_tokens_cached", "Prompt tokens found in prefix caches"),
    _metric("counter", "generation_tokens", "Output tokens", vllm="generation_tokens"),
    _metric("counter", "dispatched", "Attempts by the path they took", "path"),
    _metric("counter", "request_retries", "Failed attempts followed by another", "reason"),
    _metric("counter", "void_outputs", "Messages of workers for attempts that are over"),
    _metric("gauge", "requests_in_flight", "Sequences under way"),
    _histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS),
    _histogram("inter_token_latency_seconds", "Between two tokens of a sequence", ITL_BUCKETS),
    _histogram(
        "request_time_per_output_token_seconds", "Mean of that over a finished sequence", ITL_BUCKETS
    ),
    _histogram("e2e_request_latency_seconds", "Arrival to last token", E2E_BUCKETS),
    _histogram("request_route_time_seconds", "Arrival to the first attempt", WAIT_BUCKETS, in_vllm=False),
    _histogram("request_queue_time_seconds", "From there to the first step", TTFT_BUCKETS),
    _histogram("request_prefill_time_seconds", "From there to the first token", TTFT_BUCKETS),
    _histogram(
        "request_transfer_time_seconds", "From there to the hand-over, if any", WAIT_BUCKETS, in_vllm=False
    ),
    _histogram(
        "request_decode_wait_time_seconds", "From there to the decode worker's first step", WAIT_BUCKETS,
        in_vllm=False,
    ),
    _histogram("request_decode_time_seconds", "From there to the last token", E2E_BUCKETS),
    _histogram("request_prompt_tokens", "Prompt tokens of a sequence", TOKEN_BUCKETS),
    _histogram("request_generation_tokens", "Output tokens of a sequence", TOKEN_BUCKETS),
)  # fmt: skip


class Metrics:
    """``model``: names its metrics to vLLM's dashboards too, where it is given."""

    def __init__(self, registry: Registry, model: str = "") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double what is told
        self._registry = registry
        self._model = model
        self._own = CollectorRegistry()
        self._all = CollectorRegistry()
        self._all.register(self)
        ProcessCollector(registry=self._own)
        made = {metric.name: _make(metric, self._own) for metric in PROXY_METRICS}
        self.requests: Counter = made["requests"]
        self.refused: Counter = made["requests_refused"]
        self.attempts: Counter = made["dispatched"]
        self.retries: Counter = made["request_retries"]
        self.void_outputs: Counter = made["void_outputs"]
        self.prompt_tokens: Counter = made["prompt_tokens"]
        self.prompt_sizes: Histogram = made["request_prompt_tokens"]
        self.in_flight: Gauge = made["requests_in_flight"]
        self.ttft: Histogram = made["time_to_first_token_seconds"]
        self.itl: Histogram = made["inter_token_latency_seconds"]
        self._made = made

    def retried(self, reason: str) -> None:
        self.retries.labels(reason).inc()

    def note_end(self, record: Record) -> None:
        made = self._made
        if record.outcome == "error":
            made["request_failures"].labels(record.error).inc()
            return
        if record.outcome == "abort":
            made["request_aborts"].inc()
            return
        made["request_success"].labels(record.outcome).inc()
        made["requests_good"].inc(record.good)
        made["generation_tokens"].inc(record.num_output_tokens)
        made["prompt_tokens_cached"].inc(record.num_cached_tokens)
        made["request_generation_tokens"].observe(record.num_output_tokens)
        made["e2e_request_latency_seconds"].observe(record.total_s)
        if record.tpot_s is not None:
            made["request_time_per_output_token_seconds"].observe(record.tpot_s)
        for segment in record.segments:
            if segment.name in SEGMENT_METRICS:
                made[SEGMENT_METRICS[segment.name]].observe(segment.seconds)

    def render(self) -> bytes:
        return generate_latest(self._all)

    def collect(self) -> Iterable[Family]:
        """Called by the Prometheus library."""
        told = [*self._own.collect(), *self._workers()]
        return told + aliased(told, self._model, PROXY_METRICS) if self._model else told

    def _workers(self) -> Iterable[Family]:
        """What workers report about themselves, told apart also where they were given one name."""
        workers = list(self._registry)
        num_named = Counts(worker.name for worker in workers)
        labelled = [
            Labelled(w.name if num_named[w.name] == 1 else f"{w.name}-{w.incarnation[:8]}", w.status)
            for w in workers
        ]
        up = GaugeMetricFamily(WORKER_UP.full_name, WORKER_UP.text, labels=WORKER_LABELS)
        for name, worker in zip(labelled, workers, strict=True):
            up.add_metric(name.labels, float(worker.takes_work))
        yield up
        yield from families(labelled)


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    name = PREFIX + metric.name
    if metric.kind == "histogram":
        return Histogram(name, metric.text, metric.labels, buckets=metric.buckets, registry=registry)
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(name, metric.text, metric.labels, registry=registry)
