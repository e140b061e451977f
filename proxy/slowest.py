"""The slowest requests since the start, for ``/debug/requests``."""

import heapq
import itertools
import time

from proxy.record import Json, Record

NUM_KEPT = 100


class Slowest:
    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._num_kept = num_kept
        self._heap: list[tuple[float, int, Record]] = []  # the fastest of them first
        self._ranks = itertools.count()  # records have no order

    def note(self, record: Record) -> None:
        entry = (record.total_s, next(self._ranks), record)
        if len(self._heap) < self._num_kept:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def to_json(self) -> list[Json]:
        """The slowest first."""
        now = time.monotonic()
        return [record.to_json(now) for _, _, record in sorted(self._heap, reverse=True)]
