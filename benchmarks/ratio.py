"""How much of one thing there is for each of another, and how sure that is.

What is compared has taken turns, and a turn is what can be repeated: requests of one turn share a queue, so
that they say far less than as many independent ones would. The error is the jackknife's (M. Quenouille, 1956;
J. Tukey, 1958): how far the ratio moves when turns are left out one by one.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

Verdict = Literal["pass", "FAIL", "not shown"]


class Ratio(NamedTuple):
    value: float
    error: float  # one standard error; infinite for a single turn

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"

    def at_least(self, limit: float) -> Verdict:
        """Judged only where the error leaves no doubt."""
        return _judged(self.value - limit, self.error)

    def at_most(self, limit: float) -> Verdict:
        return _judged(limit - self.value, self.error)


def ratio_of_sums(upper: Sequence[float], lower: Sequence[float]) -> Ratio:
    """One number of each a turn; not a number where those below the line are all 0."""
    totals = sum(upper), sum(lower)
    if not totals[1]:
        return Ratio(math.nan, math.inf)
    without = [_ratio(totals[0] - u, totals[1] - v) for u, v in zip(upper, lower, strict=True)]
    count = len(without)
    if count < 2 or not all(map(math.isfinite, without)):
        return Ratio(totals[0] / totals[1], math.inf)
    mean = sum(without) / count
    variance = (count - 1) / count * sum((value - mean) ** 2 for value in without)
    return Ratio(totals[0] / totals[1], math.sqrt(variance))


def _ratio(upper: float, lower: float) -> float:
    return upper / lower if lower else math.inf


def _judged(margin: float, error: float) -> Verdict:
    if margin >= error:
        return "pass"
    return "FAIL" if margin < -error else "not shown"
