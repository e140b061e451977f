"""Percentiles and rates of the last minute, in little memory: a slot for every second, values in buckets."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

LONGEST_S = 60
GROWTH = 1.05  # from one bucket to the next: percentiles are right within 2.5 %

_LOG_GROWTH = math.log(GROWTH)
_SMALLEST = 1e-9


@dataclass(slots=True)
class _Slot:
    second: int
    amount: float = 0.0
    counts: Counter[int] = field(default_factory=Counter)  # by the rounded logarithm of the value


class Moving:
    """Values as they come, each with its time (seconds of any clock that does not go back) and, where that is
    of interest, an amount that came with it."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque(maxlen=LONGEST_S + 1)

    def add(self, value: float, now: float, amount: float = 1.0) -> None:
        second = int(now)
        if not self._slots or self._slots[-1].second != second:
            self._slots.append(_Slot(second))
        slot = self._slots[-1]
        slot.amount += amount
        slot.counts[round(math.log(max(value, _SMALLEST)) / _LOG_GROWTH)] += 1

    def rate(self, now: float, span_s: int) -> float:
        """Values a second."""
        return sum(slot.counts.total() for slot in self._within(now, span_s)) / _length_s(now, span_s)

    def amount_rate(self, now: float, span_s: int) -> float:
        """What came with them a second."""
        return sum(slot.amount for slot in self._within(now, span_s)) / _length_s(now, span_s)

    def percentiles(self, now: float, span_s: int, ranks: Sequence[float]) -> list[float | None]:
        """One value for each rank in (0, 1]; None where nothing came in the last ``span_s`` seconds."""
        counts: Counter[int] = Counter()
        for slot in self._within(now, span_s):
            counts.update(slot.counts)
        if not counts:
            return [None] * len(ranks)
        order, num_values = sorted(counts), counts.total()
        return [_value_at(order, counts, math.ceil(rank * num_values)) for rank in ranks]

    def _within(self, now: float, span_s: int) -> list[_Slot]:
        """The second that has begun counts as one."""
        return [slot for slot in self._slots if slot.second > int(now) - span_s]


def _length_s(now: float, span_s: int) -> float:
    return span_s - 1 + now % 1


def _value_at(order: list[int], counts: Counter[int], place: int) -> float:
    for bucket in order:
        place -= counts[bucket]
        if place <= 0:
            return GROWTH**bucket
    raise AssertionError("a rank is over 1")
