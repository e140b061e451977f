import math
import random
from statistics import stdev

import pytest

from benchmarks.ratio import Ratio, ratio_of_sums


def test_the_error_is_how_far_ratios_of_other_turns_would_lie() -> None:
    """Against the spread of many repetitions of the same measurement."""
    chance = random.Random(1)

    def measured() -> Ratio:
        waits = [chance.uniform(1.0, 3.0) for _ in range(12)]
        return ratio_of_sums([0.7 * wait + chance.uniform(-0.3, 0.3) for wait in waits], waits)

    found = [measured() for _ in range(500)]
    spread = stdev(ratio.value for ratio in found)
    assert sum(ratio.error for ratio in found) / len(found) == pytest.approx(spread, rel=0.15)


def test_turns_that_agree_leave_no_doubt() -> None:
    ratio = ratio_of_sums([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert ratio.value == 0.5
    assert ratio.error == pytest.approx(0.0)
    assert (ratio.at_least(0.5), ratio.at_least(0.6), ratio.at_most(0.4)) == ("pass", "FAIL", "FAIL")


def test_what_lies_within_the_error_of_the_limit_is_not_judged() -> None:
    ratio = Ratio(0.96, 0.02)
    assert ratio.at_least(0.95) == ratio.at_most(0.95) == "not shown"
    assert (ratio.at_least(0.9), ratio.at_most(0.99)) == ("pass", "pass")


def test_one_turn_or_nothing_to_compare_with_shows_nothing() -> None:
    assert ratio_of_sums([3.0], [4.0]) == Ratio(0.75, math.inf)
    assert ratio_of_sums([1.0, 2.0], [0.0, 3.0]).error == math.inf
    nothing = ratio_of_sums([1.0, 2.0], [0.0, 0.0])
    assert nothing.at_least(0.95) == "not shown"
