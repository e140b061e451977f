"""Values counted in buckets while a worker runs, cheap enough for every step."""

from bisect import bisect_left
from collections.abc import Iterable

from common.messages import Histogram
from common.metrics import Metric


class Tally:
    """``buckets`` are upper bounds, ascending, each inclusive."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Histogram:
        return Histogram(tuple(self._counts), self._total)


def tallies(metrics: Iterable[Metric]) -> dict[str, Tally]:
    """One for each histogram among ``metrics``, by its key."""
    return {metric.key: Tally(metric.buckets) for metric in metrics if metric.kind == "histogram"}
