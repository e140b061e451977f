"""Whom requests tell what became of them, once for each token and once at the end."""

from common.tracing import Tracer
from proxy.live import Live
from proxy.metrics import Metrics
from proxy.record import Record
from proxy.slowest import Slowest


class Observer:
    """``slo_ttft_s`` and ``slo_itl_s`` are what a good request keeps to; 0: anything is good."""

    def __init__(
        self, metrics: Metrics, live: Live, slo_ttft_s: float, slo_itl_s: float, tracer: Tracer | None = None
    ) -> None:
        self.live = live
        self.tracer = tracer
        self.slowest = Slowest()
        self._metrics = metrics
        self._slo_ttft_s = slo_ttft_s
        self._slo_itl_s = slo_itl_s

    def note_first_token(self, ttft_s: float, num_tokens: int, now: float) -> None:
        self._metrics.ttft.observe(ttft_s)
        self.live.note_first_token(ttft_s, num_tokens, now)

    def note_tokens(self, gap_s: float, num_tokens: int, now: float) -> None:
        self._metrics.itl.observe(gap_s)
        self.live.note_tokens(gap_s, num_tokens, now)

    def note_end(self, record: Record, now: float) -> None:
        self._metrics.note_end(record)
        self.live.note_end(record, now)
        self.slowest.note(record)

    def is_good(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """A request of one token has no time between tokens."""
        in_time = not self._slo_ttft_s or (ttft_s or 0.0) <= self._slo_ttft_s
        return in_time and (not self._slo_itl_s or (tpot_s or 0.0) <= self._slo_itl_s)
