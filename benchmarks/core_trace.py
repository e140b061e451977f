"""Which threads ran on a core, and when: the kernel's own record, for root on Linux."""

import bisect
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

TRACING = Path("/sys/kernel/tracing")
BUFFER_KB = 64_000
SWITCH = re.compile(r" ([\d.]+): sched_switch: .* next_pid=(\d+)")
IDLE = 0


@dataclass(slots=True)
class CoreTrace:
    """Filled when the recording ends. Times are those of ``time.perf_counter``."""

    times: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)  # that ran from each of these times on

    def foreign_s(self, start: float, end: float, ours: Collection[int]) -> float:
        """For how long others than these threads ran."""
        total_s = 0.0
        index = max(0, bisect.bisect_right(self.times, start) - 1)
        while index < len(self.times) and self.times[index] < end:
            until = self.times[index + 1] if index + 1 < len(self.times) else end
            if self.threads[index] != IDLE and self.threads[index] not in ours:
                total_s += max(0.0, min(until, end) - max(self.times[index], start))
            index += 1
        return total_s


@contextmanager
def recording(core: int) -> Iterator[CoreTrace]:
    """Raises ``OSError`` where the kernel does not allow it."""
    trace = CoreTrace()
    every_core = (TRACING / "tracing_cpumask").read_text()
    for name, value in (
        ("tracing_on", "0"),
        ("trace_clock", "mono"),
        ("buffer_size_kb", str(BUFFER_KB)),
        ("trace", ""),
        ("tracing_cpumask", f"{1 << core:x}"),
        ("events/sched/sched_switch/enable", "1"),
        ("tracing_on", "1"),
    ):
        (TRACING / name).write_text(value)
    try:
        yield trace
    finally:
        (TRACING / "tracing_on").write_text("0")
        (TRACING / "events/sched/sched_switch/enable").write_text("0")
        (TRACING / "tracing_cpumask").write_text(every_core)
        with (TRACING / "trace").open() as lines:
            for line in lines:
                if found := SWITCH.search(line):
                    trace.times.append(float(found[1]))
                    trace.threads.append(int(found[2]))
