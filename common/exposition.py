"""Workers' reports as Prometheus shows them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from common.messages import Histogram, Status
from common.metrics import PREFIX, WORKER_LABELS, WORKER_METRICS, Metric


class Labelled(NamedTuple):
    name: str  # that tells it from all others
    status: Status

    @property
    def labels(self) -> list[str]:
        return [self.name, self.status.role]


def families(workers: Sequence[Labelled]) -> Iterable[Family]:
    """Metrics that no worker tells are left out."""
    names = {worker.status.incarnation: worker.name for worker in workers}
    for metric in WORKER_METRICS:
        family = _family(metric, workers, names)
        if family.samples:
            yield family


def _family(metric: Metric, workers: Sequence[Labelled], names: Mapping[str, str]) -> Family:
    if metric.kind == "histogram":
        return _histogram(metric, workers)
    if metric.kind == "counter":
        return _counter(metric, workers, names)
    family = GaugeMetricFamily(PREFIX + metric.name, metric.text, labels=WORKER_LABELS)
    for worker in workers:
        if (value := gauges_of(worker.status).get(metric.key)) is not None:
            family.add_metric(worker.labels, value)
    return family


def _counter(metric: Metric, workers: Sequence[Labelled], names: Mapping[str, str]) -> Family:
    labels = [*WORKER_LABELS, *metric.labels]
    family = CounterMetricFamily(PREFIX + metric.name, metric.text, labels=labels)
    for worker in workers:
        for cause, value in _of_key(metric.key, worker.status.counters):
            causes = [names.get(cause, cause)] if metric.labels else []
            family.add_metric([*worker.labels, *causes], value)
    return family


def _histogram(metric: Metric, workers: Sequence[Labelled]) -> Family:
    family = HistogramMetricFamily(PREFIX + metric.name, metric.text, labels=WORKER_LABELS)
    for worker in workers:
        told = worker.status.histograms.get(metric.key)
        # A worker of another version may count in other buckets.
        if told is not None and len(told.counts) == len(metric.buckets) + 1:
            family.add_metric(worker.labels, _cumulative(metric, told), told.total)
    return family


def _of_key(key: str, counters: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    for told, value in counters.items():
        name, _, cause = told.partition(":")
        if name == key:
            yield cause, value


def gauges_of(status: Status) -> dict[str, float]:
    """The load's fields under the names of their metrics, and what else the worker tells."""
    load = status.load
    return status.gauges | {
        "num_requests_running": load.num_running,
        "num_requests_waiting": load.num_waiting,
        "num_queued_tokens": load.num_queued_tokens,
        "num_free_blocks": load.num_free_blocks,
        "num_blocks": load.num_blocks,
        "num_parked_blocks": load.num_parked_blocks,
        "num_receiving": load.num_receiving,
        "kv_cache_usage_perc": 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
    }


def _cumulative(metric: Metric, told: Histogram) -> list[tuple[str, float]]:
    bounds = [floatToGoString(bound) for bound in (*metric.buckets, math.inf)]  # type: ignore[no-untyped-call]
    return list(zip(bounds, map(float, accumulate(told.counts)), strict=True))
