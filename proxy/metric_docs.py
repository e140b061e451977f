"""The page ``docs/metrics.md``, written from the tables of metrics."""

from collections.abc import Iterable, Iterator

from common import metrics
from common.metrics import WORKER_LABELS, Metric
from proxy.metrics import PROXY_METRICS, WORKER_UP

_OPENING = """\
# Metrics

<!-- Written by `python -m proxy.metric_docs > docs/metrics.md`; a test compares. -->

`GET /metrics` on the proxy's port tells, in Prometheus' format, what the proxy counts and what its workers
report to it with every heartbeat: one place to ask. A worker tells its own, without a proxy, on
`--metrics-port`. Seconds, bytes and tokens throughout; a name in `_perc` or `_ratio` is a share from 0 to
1. Histograms come as `_bucket`, `_sum` and `_count`. Each process adds Prometheus' own `process_*` of
itself where the platform has them.

Where several proxies share a port, the one that is asked tells the figures of all, with a label `proxy`.

`--vllm-metric-names` tells the metrics of the last column a second time, as `vllm:NAME` with a label
`model_name`, so that dashboards made for vLLM work.

A board for Grafana is in `deploy/grafana`; alert rules and a scrape configuration are in
`deploy/prometheus`.

A request's time is split without gaps: route, queue, prefill, transfer, wait, decode (the
`request_*_time_seconds`; `"timings": true` in a request tells them of that one, `/debug/requests` of the
slowest). A good request is one that finished within `--slo-ttft-s` and, in the mean between its tokens,
`--slo-itl-s`; goodput is the rate of those.
"""

_HEAD = """
## {title}

| metric | kind | labels | meaning | buckets | vLLM |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    return _OPENING + "".join(_sections())


def _sections() -> Iterator[str]:
    yield from _section("The proxy", (), PROXY_METRICS)
    for title, table in (
        ("Workers: load", (WORKER_UP._replace(labels=()), *metrics.LOAD_METRICS)),
        ("Workers: the engine", metrics.ENGINE_METRICS),
        ("Prefill workers: transfers", metrics.SENDER_METRICS),
        ("Decode workers: transfers", metrics.RECEIVER_METRICS),
        ("Workers: processes and GPUs", metrics.PROCESS_METRICS),
    ):
        yield from _section(title, WORKER_LABELS, table)


def _section(title: str, labels: tuple[str, ...], table: Iterable[Metric]) -> Iterator[str]:
    yield _HEAD.format(title=title)
    for metric in table:
        shown = ", ".join(f"`{label}`" for label in (*labels, *metric.labels))
        bounds = f"{metric.buckets[0]:g} to {metric.buckets[-1]:g}" if metric.buckets else ""
        alias = f"`{metric.vllm}`" if metric.vllm else ""
        yield f"| `{metric.full_name}` | {metric.kind} | {shown} | {metric.text} | {bounds} | {alias} |\n"


if __name__ == "__main__":
    print(page(), end="")
