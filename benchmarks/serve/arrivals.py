"""When requests are due, in seconds from the beginning of a run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Process = Literal["poisson", "constant", "burst"]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come whether or not earlier ones are answered, ``rate`` a second on average: with exponential
    gaps (poisson), with equal gaps (constant), or all at once (burst)."""

    rate: float
    process: Process = "poisson"

    @property
    def label(self) -> str:
        return "all at once" if self.process == "burst" else f"{self.rate:g}/s"

    def times(self, seed: int) -> Iterator[float]:
        """One for each request, without end."""
        random_gaps = random.Random(seed)
        at = 0.0
        while True:
            yield at
            if self.process == "poisson":
                at += random_gaps.expovariate(self.rate)
            elif self.process == "constant":
                at += 1 / self.rate


@dataclass(frozen=True, slots=True)
class TraceLoop:
    """Requests come as a trace says, ``speed`` times as fast."""

    rate: float  # of the part of the trace that is replayed, after the speed
    speed: float = 1.0

    @property
    def label(self) -> str:
        return f"trace × {self.speed:g} ({self.rate:.3g}/s)"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``concurrency`` clients, each of which sends its next request when the last one is answered."""

    concurrency: int

    @property
    def label(self) -> str:
        return f"{self.concurrency} at a time"


Load = OpenLoop | TraceLoop | ClosedLoop
