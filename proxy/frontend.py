"""What the endpoints share."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.config import ProxyConfig
from proxy.dispatcher import Dispatcher
from proxy.errors import too_many_requests
from proxy.metrics import Metrics
from proxy.observer import Observer
from proxy.prompts import Limits
from proxy.registry import Registry
from proxy.served_model import ServedModel


@dataclass(slots=True)
class Frontend:
    config: ProxyConfig
    model: ServedModel
    registry: Registry
    dispatcher: Dispatcher
    metrics: Metrics
    observer: Observer
    num_admitted: int = 0
    started_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int:
        return min(self.registry.max_model_len() or self.model.max_model_len, self.model.max_model_len)

    def limits(self) -> Limits:
        fallback = self.config.prefill_fallback  # what is too long for prefill workers goes to decode workers
        return Limits(
            max_model_len=self.max_model_len,
            max_total_tokens=self.registry.longest_sequence("decode"),
            max_prompt_tokens=None if fallback else self.registry.longest_sequence("prefill"),
            max_choices=self.config.max_queued_requests,
            max_timeout_s=self.config.request_timeout_s,
        )

    @contextlib.contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """A place among the requests under way for each of ``count`` sequences; ApiError at once when
        full."""
        if self.num_admitted + count > self.config.max_queued_requests:
            self.metrics.refused.labels("too_many").inc()
            raise too_many_requests(self.config.max_queued_requests)
        self._set_admitted(self.num_admitted + count)
        try:
            yield
        finally:
            self._set_admitted(self.num_admitted - count)

    def _set_admitted(self, count: int) -> None:
        self.num_admitted = self.observer.live.num_in_flight = count
        self.metrics.in_flight.set(count)
