"""What this proxy counts, for Prometheus. Names follow ``vllm:*`` with our prefix, in seconds and bytes."""

import re
from collections import Counter as Counts
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from proxy.attempt import Attempt
from proxy.registry import Registry
from proxy.router import Choice
from proxy.worker import Worker

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class Metrics:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._collected = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        self.requests = counter("requests", "HTTP requests by how they ended", "outcome")
        self.refused = counter(
            "requests_refused", "Requests refused before any worker heard of them", "reason"
        )
        self.finished = counter("request_success", "Sequences by finish reason", "finished_reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in prefix caches")
        self.generation_tokens = counter("generation_tokens", "Output tokens")
        self.attempts = counter("dispatched", "Attempts by the path they took", "path")
        self.retries = counter("request_retries", "Failed attempts followed by another", "reason")
        self.void_outputs = counter("void_outputs", "Messages of workers for attempts that are over")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of a sequence", ITL_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token", E2E_BUCKETS)
        self.prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens", TOKEN_BUCKETS)
        self.output_sizes = histogram("request_generation_tokens", "Output tokens", TOKEN_BUCKETS)
        text = "Sequences under way"
        self.in_flight = Gauge("baton_requests_in_flight", text, registry=self._collected)
        self._collected.register(self)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", text, labels, registry=self._collected)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton_{name}", text, buckets=buckets, registry=self._collected)

    def dispatched(self, attempt: Attempt, choice: Choice) -> None:
        path = "fallback" if choice.fallback else "disaggregated" if attempt.prefill else "colocated"
        self.attempts.labels(path).inc()

    def retried(self, reason: str) -> None:
        self.retries.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self._collected)

    def collect(self) -> Iterable[Metric]:
        """What workers report about themselves; called by the Prometheus library."""
        labels = ["worker", "role"]
        workers = _labelled(self._registry)
        up = GaugeMetricFamily("baton_worker_up", "Whether the worker takes work", labels=labels)
        for values, worker in workers:
            up.add_metric(values, float(worker.takes_work))
        yield up
        for name, text, field in WORKER_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for values, worker in workers:
                gauge.add_metric(values, getattr(worker.status.load, field))
            yield gauge
        yield from _worker_counters(workers)


WORKER_GAUGES = (
    ("baton_num_requests_running", "Sequences in the worker's steps", "num_running"),
    ("baton_num_requests_waiting", "Sequences in the worker's queue", "num_waiting"),
    ("baton_num_queued_tokens", "Tokens that the worker has yet to compute", "num_queued_tokens"),
    ("baton_num_free_blocks", "Blocks that are free or can be evicted", "num_free_blocks"),
    ("baton_num_blocks", "Blocks of the pool", "num_blocks"),
    ("baton_num_parked_blocks", "Blocks that wait for a decode worker", "num_parked_blocks"),
    ("baton_num_receiving", "Transfers under way into the worker", "num_receiving"),
)


def _labelled(registry: Registry) -> list[tuple[list[str], Worker]]:
    """Workers with the labels that tell them apart, also those that were given one name."""
    workers = list(registry)
    num_named = Counts(worker.name for worker in workers)
    return [
        ([w.name if num_named[w.name] == 1 else f"{w.name}-{w.incarnation[:8]}", w.role], w) for w in workers
    ]


def _worker_counters(workers: list[tuple[list[str], Worker]]) -> Iterable[Metric]:
    """Totals from Status.counters; ``name:cause`` becomes a label."""
    families: dict[str, CounterMetricFamily] = {}
    for values, worker in workers:
        for key, value in worker.status.counters.items():
            name, _, cause = key.partition(":")
            name = "baton_worker_" + re.sub(r"\W", "_", name.removesuffix("_total"), flags=re.ASCII)
            if name not in families:
                labels = ["worker", "role", "cause"]
                families[name] = CounterMetricFamily(name, "Reported by workers", labels=labels)
            families[name].add_metric([*values, cause], value)
    return families.values()
