"""What steps cost: charged to the sequences in them, and counted for the metrics."""

import time
from collections.abc import Sequence as Many

from common import timings
from common.messages import Histogram
from common.metrics import ENGINE_METRICS
from common.pace import Stopwatch
from common.scheduler import Work
from common.sequence import Cost, Sequence
from common.tally import tallies


class StepMeter:
    """Called by the engine's thread, twice a step; what is read may be read in any thread."""

    def __init__(self, step_tokens: int) -> None:
        self.stopwatch = Stopwatch(step_tokens)
        self._tallies = tallies(ENGINE_METRICS)
        self._planned_at = 0.0
        self._plan_s = 0.0

    def planned(self, began_at: float) -> None:
        """Taking blocks and choosing work began then (``time.monotonic()``) and is done."""
        self._planned_at = began_at
        self._plan_s = time.monotonic() - began_at

    def computed(self, works: Many[Work], began_at: float, built_at: float) -> None:
        """The batch was made from ``began_at`` to ``built_at`` and computed until now. To be called before
        the results are recorded."""
        now = time.monotonic()
        cache_s, kernel_s = self._plan_s + built_at - began_at, now - built_at
        num_tokens = [work.num_tokens for work in works]
        self.stopwatch.note(num_tokens, now - began_at)
        kind = "decode_step_seconds" if max(num_tokens) == 1 else "prefill_step_seconds"
        self._tallies[kind].observe(now - self._planned_at)
        self._tallies["step_sequences"].observe(len(works))
        self._tallies["step_tokens"].observe(sum(num_tokens))
        for work in works:
            cost = self._cost(work.sequence)
            cost.kernel_s += kernel_s
            cost.cache_s += cache_s

    def histograms(self) -> dict[str, Histogram]:
        return {key: tally.read() for key, tally in self._tallies.items()}

    def _cost(self, sequence: Sequence) -> Cost:
        marks = sequence.marks
        if timings.ADOPTED in marks:
            if marks[timings.SCHEDULED] == self._planned_at:  # its first step
                self._tallies["decode_wait_seconds"].observe(self._planned_at - marks[timings.ADOPTED])
            return sequence.decode_cost
        return sequence.decode_cost if timings.FIRST_TOKEN in marks else sequence.prefill_cost
