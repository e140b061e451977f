"""What the endpoints share."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.config import ProxyConfig
from proxy.admission import Admission
from proxy.dispatcher import Dispatcher
from proxy.errors import ApiError
from proxy.fleet import Targets
from proxy.job import Job
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
    admission: Admission
    started_at: int = field(default_factory=lambda: int(time.time()))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # no new work; long streams of ours end

    @property
    def targets(self) -> Targets:
        """Of requests that name none."""
        return Targets(self.config.slo_ttft_s, self.config.slo_itl_s)

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
    def admit(self, job: Job) -> Iterator[int]:
        """A place among the requests under way for each of the job's sequences, and their priority; ApiError
        at once when there is none."""
        key, count = job.caller.key, job.num_choices
        try:
            self.admission.enter(key, count)
        except ApiError:
            self.metrics.refused.labels("too_many").inc()
            raise
        try:
            yield self.admission.priority(key, job.priority)
        finally:
            self.admission.leave(key, count)
