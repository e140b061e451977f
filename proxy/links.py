"""Rates from what workers report about themselves: totals since their start, some of them by peer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LINK_BYTES = "transfer_link_bytes_total"  # of a prefill worker, by incarnation of the decode worker

_RATES = {
    "prompt_tokens": "prompt_tokens_total",
    "cached_tokens": "cached_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "steps": "steps_total",
    "sent_bytes": "transfer_sent_bytes_total",
    "received_bytes": "transfer_received_bytes_total",
    "cpu_seconds": "process_cpu_seconds_total",
}


class Report(NamedTuple):
    at: float  # time.monotonic()
    counters: Mapping[str, float]


def rates_of(reports: Sequence[Report]) -> dict[str, float | None]:
    """By short name; None for what is not told, or told once only."""
    return {name: _rate(reports, counter) for name, counter in _RATES.items()}


def links_of(workers: Mapping[str, tuple[str, Sequence[Report]]]) -> list[dict[str, object]]:
    """Links over which anything has gone, from name and reports of each worker by its incarnation."""
    links: list[dict[str, object]] = []
    for name, reports in workers.values():
        for counter, num_bytes in reports[-1].counters.items():
            kind, _, peer = counter.partition(":")
            if kind == LINK_BYTES and peer in workers:
                rate = _rate(reports, counter)
                link = {"prefill": name, "decode": workers[peer][0], "bytes": num_bytes, "bytes_per_s": rate}
                links.append(link)
    return links


def _rate(reports: Sequence[Report], counter: str) -> float | None:
    first, last = reports[0], reports[-1]
    if last.at <= first.at or counter not in last.counters:
        return None
    return (last.counters[counter] - first.counters.get(counter, 0.0)) / (last.at - first.at)
