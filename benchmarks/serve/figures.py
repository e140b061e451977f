"""What a run comes to. Latencies are in seconds and count from the moment a request was really sent; how late
that was is told apart, and a run whose generator was late is no measurement of the server.

- TTFT: to the first chunk with tokens; ITL: between two such chunks; E2E: to the end of the answer
- TPOT: from first to last chunk, for each token after the first
- attainment: share of the requests sent that met every target; those that failed met none
- goodput: such requests per second
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.serve.client import Outcome
from benchmarks.serve.generator import Run

LATE_S = 0.01
MAX_ERRORS = 10
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Targets:
    """Service level objectives in seconds; infinite: none."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf

    def __bool__(self) -> bool:
        return min(self.ttft_s, self.tpot_s, self.e2e_s) < math.inf

    def met_by(self, outcome: Outcome) -> bool:
        return (
            not outcome.error
            and ttft_s(outcome) <= self.ttft_s
            and (tpot_s(outcome) or 0.0) <= self.tpot_s
            and e2e_s(outcome) <= self.e2e_s
        )


@dataclass(frozen=True, slots=True)
class Figures:
    num_sent: int
    num_failed: int
    errors: dict[str, int]  # how often each came; the most frequent ones
    wall_s: float  # from the beginning to the last answer
    sent_per_s: float  # while requests were being sent
    answered_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float  # of prompt tokens, as the server tells
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    itl_s: dict[str, float]
    e2e_s: dict[str, float]
    attainment: float
    goodput_per_s: float
    lateness_s: dict[str, float]  # of the generator itself
    num_late: int  # sent more than LATE_S after they were due
    num_lost: int  # due and never sent
    generator_cpu_share: float  # of one core

    @property
    def doubt(self) -> str:
        """Why these are no figures of the server; empty: they are."""
        if self.num_lost:
            return f"{self.num_lost} requests were never sent: too many were under way (--max-open)"
        if self.num_late > max(1, self.num_sent // 100):
            return f"{self.num_late} of {self.num_sent} requests were sent over {1e3 * LATE_S:g} ms late"
        if self.generator_cpu_share > 0.8:
            return f"the generator itself was busy ({self.generator_cpu_share:.0%} of a core)"
        return ""


def ttft_s(outcome: Outcome) -> float:
    return outcome.token_times[0] - outcome.sent_at


def e2e_s(outcome: Outcome) -> float:
    return outcome.ended_at - outcome.sent_at


def gaps_s(outcome: Outcome) -> list[float]:
    return [later - sooner for sooner, later in pairwise(outcome.token_times)]


def tpot_s(outcome: Outcome) -> float | None:
    """None for an answer of one token."""
    if outcome.num_output_tokens < 2:
        return None
    return (outcome.token_times[-1] - outcome.token_times[0]) / (outcome.num_output_tokens - 1)


def figures(run: Run, targets: Targets) -> Figures:
    whole = [outcome for outcome in run.outcomes if not outcome.error]
    num_prompt = sum(outcome.num_prompt_tokens for outcome in whole)
    num_good = sum(map(targets.met_by, run.outcomes))
    lateness = [outcome.sent_at - outcome.due_at for outcome in run.outcomes]
    return Figures(
        num_sent=len(run.outcomes),
        num_failed=len(run.outcomes) - len(whole),
        errors=dict(
            Counter(outcome.error for outcome in run.outcomes if outcome.error).most_common(MAX_ERRORS)
        ),
        wall_s=run.wall_s,
        sent_per_s=_sent_per_s(run.outcomes),
        answered_per_s=_ratio(len(whole), run.wall_s),
        prompt_tokens_per_s=_ratio(num_prompt, run.wall_s),
        output_tokens_per_s=_ratio(sum(outcome.num_output_tokens for outcome in whole), run.wall_s),
        cached_share=_ratio(sum(outcome.num_cached_tokens for outcome in whole), num_prompt),
        ttft_s=distribution([ttft_s(outcome) for outcome in whole]),
        tpot_s=distribution([found for outcome in whole if (found := tpot_s(outcome)) is not None]),
        itl_s=distribution([gap for one in whole for gap in gaps_s(one)]),
        e2e_s=distribution([e2e_s(outcome) for outcome in whole]),
        attainment=_ratio(num_good, len(run.outcomes)),
        goodput_per_s=_ratio(num_good, run.wall_s),
        lateness_s=distribution(lateness),
        num_late=sum(late > LATE_S for late in lateness),
        num_lost=run.num_lost,
        generator_cpu_share=_ratio(run.cpu_s, run.wall_s),
    )


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles (interpolated) and maximum; empty for no values."""
    if not values:
        return {}
    found = {
        f"p{q}": float(value)
        for q, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }
    return {"mean": float(np.mean(values))} | found | {"max": max(values)}


def bearable_rate(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """The highest rate up to which attainment stays at or above ``share``, from (rate, attainment) points in
    order of rate, between two of them on a straight line; None when not even the first has it."""
    found = None
    for number, (rate, attained) in enumerate(points):
        if attained >= share:
            found = rate
            continue
        if number == 0:
            return None
        borne, before = points[number - 1]
        return borne + (rate - borne) * (before - share) / (before - attained)
    return found


def _sent_per_s(outcomes: Sequence[Outcome]) -> float:
    """Of the gaps between requests: the first one comes at no time at all."""
    if len(outcomes) < 2:
        return 0.0
    sent = sorted(outcome.sent_at for outcome in outcomes)
    return _ratio(len(sent) - 1, sent[-1] - sent[0])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
