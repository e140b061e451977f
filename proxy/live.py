"""What the live page and ``baton top`` show: the workers, the links between them, and the last minute.

``Live.snapshot()`` is JSON of this shape (seconds, rates per second, null where nothing is known):

    {"at": 1764449000.1,                      wall clock
     "uptime_s": 12.5,
     "model": "smollm2-135m-instruct",
     "ready": true,                           a request would be served now
     "in_flight": 3,                          sequences under way
     "slo": {"ttft_s": 0.0, "itl_s": 0.0},    targets; 0: none
     "workers": [{                            by role and name; prefill first
         "id": "f3a9...",                     incarnation: another one after every start
         "name": "prefill-0", "role": "prefill",
         "state": "ready",                    ready, draining, silent, refused, or lost: its connection ended,
                                              shown for two minutes or until a worker of that name is back
         "reason": null,                      of a refusal or a loss
         "trusted": true,                     false: it has failed lately and gets no work for a while
         "pid": 4711, "address": null, "heard_s_ago": 0.2,
         "load": {"num_waiting": 0, "num_running": 1, "num_queued_tokens": 0, "num_free_blocks": 900,
                  "num_blocks": 1000, "num_parked_blocks": 0, "num_receiving": 0},
         "kv_use": 0.1,                       share of its blocks that cannot be taken
         "rates": {"prompt_tokens": 512.0, "cached_tokens": 0.0, "generation_tokens": 1.0, "steps": 2.0,
                   "sent_bytes": 1.2e7, "received_bytes": 0.0, "cpu_seconds": 0.9},
         "memory_bytes": 700000000}],         resident; null where it is not told
     "links": [{"prefill": "prefill-0", "decode": "decode-0", "bytes": 1.5e9, "bytes_per_s": 1.2e7}],
     "windows": {"10": WINDOW, "60": WINDOW}, the last so many seconds
     "recent": [RECORD, ...]}                 requests that ended, the latest first, 14 at most

    WINDOW  {"ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "e2e_p50_s", "e2e_p99_s",
             "requests_per_s", "good_per_s", "errors_per_s", "output_tokens_per_s", "prompt_tokens_per_s"}
    RECORD  as ``Record.to_json`` in proxy/record.py: "id", "arrived_s_ago", "outcome", "error",
            "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "tpot_s", "total_s", "good",
            "routes": [{"prefill", "decode", "path", "error"}], one for each attempt,
            "segments": [{"name", "start_s", "seconds"}], in this order, some may be missing:
                route, retry, queue, prefill, transfer, wait, decode
            "split": {"kernel_s", "scheduling_s", "transfer_s", "cache_s"}

Rates of workers need two of their reports: they are null in the first snapshot after a while without any.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.admission import Admission
from proxy.links import Report, links_of, rates_of
from proxy.moving import LONGEST_S, Moving
from proxy.record import Record
from proxy.registry import Registry
from proxy.worker import Worker

NUM_RECENT = 14  # as many as the page has room for: each snapshot carries them
SPANS_S = (10, LONGEST_S)
LOST_SHOWN_S = 120.0
REPORTS_KEPT_S = 3.0  # rates are means over this time

Json = dict[str, Any]


@dataclass(slots=True)
class _Known:
    """A worker as it was last seen."""

    worker: Worker
    lost_at: float | None = None
    reports: deque[Report] = field(default_factory=deque)


class Live:
    """Fed by the requests; costs less than a microsecond a token while nobody looks."""

    def __init__(
        self, registry: Registry, admission: Admission, model: str, slo_ttft_s: float, slo_itl_s: float
    ) -> None:
        self._registry = registry
        self._model = model
        self._slo = {"ttft_s": slo_ttft_s, "itl_s": slo_itl_s}
        self._started_at = time.monotonic()
        self._known: dict[str, _Known] = {}  # by incarnation
        self._recent: deque[Record] = deque(maxlen=NUM_RECENT)
        self._ttft, self._itl, self._e2e = Moving(), Moving(), Moving()
        self._good, self._errors = Moving(), Moving()
        self._ended = Moving()
        self._admission = admission

    def note_first_token(self, ttft_s: float, num_tokens: int, now: float) -> None:
        self._ttft.add(ttft_s, now, num_tokens)

    def note_tokens(self, gap_s: float, num_tokens: int, now: float) -> None:
        self._itl.add(gap_s, now, num_tokens)

    def note_end(self, record: Record, now: float) -> None:
        self._recent.appendleft(record)
        self._ended.add(record.total_s, now, record.num_prompt_tokens)
        if record.outcome == "error":
            self._errors.add(1.0, now)
        elif record.outcome != "abort":
            self._e2e.add(record.total_s, now)
        if record.good:
            self._good.add(1.0, now)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way and nothing ended in the shorter of the windows."""
        return not self._admission.num_admitted and not self._ended.rate(time.monotonic(), min(SPANS_S))

    def snapshot(self) -> Json:
        now = time.monotonic()
        self._look(now)
        known = sorted(self._known.values(), key=lambda k: (k.worker.role != "prefill", k.worker.name))
        return {
            "at": time.time(),
            "uptime_s": now - self._started_at,
            "model": self._model,
            "ready": self._registry.serves,
            "in_flight": self._admission.num_admitted,
            "slo": self._slo,
            "workers": [_describe(k, now) for k in known],
            "links": links_of({k.worker.incarnation: (k.worker.name, k.reports) for k in known}),
            "windows": {str(span_s): self._window(now, span_s) for span_s in SPANS_S},
            "recent": [record.to_json(now) for record in self._recent],
        }

    def _look(self, now: float) -> None:
        """Bring what is known of the workers up to date."""
        present = {worker.incarnation: worker for worker in self._registry}
        names = {worker.name for worker in present.values()}
        for incarnation, known in list(self._known.items()):
            if incarnation in present:
                continue
            known.lost_at = known.lost_at or now
            if known.worker.name in names or now - known.lost_at > LOST_SHOWN_S:
                del self._known[incarnation]
        for incarnation, worker in present.items():
            known = self._known.setdefault(incarnation, _Known(worker))
            known.worker, known.lost_at = worker, None
            if not known.reports or known.reports[-1].at < worker.heard_at:
                known.reports.append(Report(worker.heard_at, worker.status.counters))
            while len(known.reports) > 2 and known.reports[0].at < now - REPORTS_KEPT_S:
                known.reports.popleft()

    def _window(self, now: float, span_s: int) -> Json:
        window: Json = {}
        for name, moving in (("ttft", self._ttft), ("itl", self._itl), ("e2e", self._e2e)):
            p50, p99 = moving.percentiles(now, span_s, (0.5, 0.99))
            window |= {f"{name}_p50_s": p50, f"{name}_p99_s": p99}
        return window | {
            "requests_per_s": self._ended.rate(now, span_s),
            "good_per_s": self._good.rate(now, span_s),
            "errors_per_s": self._errors.rate(now, span_s),
            "output_tokens_per_s": self._ttft.amount_rate(now, span_s) + self._itl.amount_rate(now, span_s),
            "prompt_tokens_per_s": self._ended.amount_rate(now, span_s),
        }


def _describe(known: _Known, now: float) -> Json:
    worker, status = known.worker, known.worker.status
    load = status.load
    state = worker.shown_state if known.lost_at is None else "lost"
    return {
        "id": worker.incarnation,
        "name": worker.name,
        "role": worker.role,
        "state": state,
        "reason": worker.reason or ("its connection ended" if known.lost_at is not None else None),
        "trusted": worker.breaker.allows(now),
        "pid": status.pid,
        "address": status.address or None,
        "heard_s_ago": round(now - worker.heard_at, 3),
        "load": msgspec.to_builtins(load),
        "kv_use": 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
        "rates": rates_of(known.reports),
        "memory_bytes": status.gauges.get("process_resident_memory_bytes"),
    }
