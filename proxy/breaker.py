"""Whether a worker deserves new work, judged by what became of earlier work.

    closed      takes work; MAX_FAILURES different requests failing in a row open it
    open        takes none until its cool-down is over
    half open   takes one request as a probe: success closes it, failure opens it for twice as long

Only different requests count, so that one request that always fails, retried, condemns nobody.
"""

from dataclasses import dataclass, field

MAX_FAILURES = 3
COOL_DOWN_S = (1.0, 30.0)  # first and longest


@dataclass(slots=True)
class Breaker:
    failed_requests: set[str] = field(default_factory=set)
    opened_until: float | None = None  # time.monotonic(); None: closed
    cool_down_s: float = COOL_DOWN_S[0]
    probe: str | None = None  # the request that tries a half-open worker out

    def allows(self, now: float) -> bool:
        if self.opened_until is None:
            return True
        return now >= self.opened_until and self.probe is None

    def dispatched(self, request_id: str) -> None:
        if self.opened_until is not None and self.probe is None:
            self.probe = request_id

    def succeeded(self) -> None:
        self.failed_requests.clear()
        self.opened_until = self.probe = None
        self.cool_down_s = COOL_DOWN_S[0]

    def failed(self, request_id: str, now: float) -> None:
        self.failed_requests.add(request_id)
        if self.probe == request_id:
            self.cool_down_s = min(2 * self.cool_down_s, COOL_DOWN_S[1])
            self.opened_until = now + self.cool_down_s
        elif self.opened_until is None and len(self.failed_requests) >= MAX_FAILURES:
            self.opened_until = now + self.cool_down_s

    def settled(self, request_id: str) -> None:
        """The attempt is over; a probe that proved nothing makes room for another."""
        if self.probe == request_id:
            self.probe = None
