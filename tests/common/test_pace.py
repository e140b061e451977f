import pytest

from common.messages import Pace
from common.pace import Stopwatch


def test_nothing_is_known_before_the_first_step() -> None:
    assert Stopwatch().pace == Pace(0.0, 0.0)


def test_steps_with_prompts_and_steps_of_single_tokens_are_kept_apart() -> None:
    watch = Stopwatch()
    watch.note([512], 0.25)
    watch.note([1, 1, 1], 0.02)
    assert watch.pace == Pace(prefill_tokens_per_s=2048.0, step_s=0.02)


def test_a_prompt_does_not_pay_for_the_single_tokens_beside_it() -> None:
    watch = Stopwatch()
    watch.note([1, 1, 1], 0.02)
    watch.note([100, 1, 1, 1], 0.07)
    assert watch.pace.prefill_tokens_per_s == pytest.approx(2000.0)
    quick = Stopwatch()
    quick.note([1, 1, 1], 0.02)
    quick.note([100, 1, 1, 1], 0.02)  # no measure of how little time is left
    assert quick.pace.prefill_tokens_per_s == pytest.approx(20_000.0)


def test_what_was_measured_long_ago_fades() -> None:
    watch = Stopwatch()
    watch.note([100], 10.0)
    for _ in range(100):
        watch.note([100], 0.1)
        watch.note([1], 0.05)
    assert 900 < watch.pace.prefill_tokens_per_s < 1001
    assert abs(watch.pace.step_s - 0.05) < 1e-9


def test_one_step_that_was_interrupted_changes_little() -> None:
    watch = Stopwatch()
    for duration_s in (0.02, 0.02, 5.0):
        watch.note([1], duration_s)
    assert watch.pace.step_s < 0.025


def test_long_prompts_count_more_than_short_ones() -> None:
    watch = Stopwatch()
    watch.note([1000], 0.5)
    watch.note([40], 0.05)
    assert watch.pace.prefill_tokens_per_s > 1500


def test_a_few_tokens_tell_nothing_of_how_fast_many_are() -> None:
    """What they say, ten tokens in 10 ms, had long prompts refused for a time that these never took."""
    watch = Stopwatch()
    for _ in range(50):
        watch.note([10], 0.01)
    assert watch.pace.prefill_tokens_per_s == 0.0
    watch.note([3000], 1.0)
    for _ in range(50):
        watch.note([10, 1], 0.01)
    assert watch.pace.prefill_tokens_per_s == 3000.0


def test_steps_that_hold_but_a_few_tokens_tell_what_they_can() -> None:
    watch = Stopwatch(step_tokens=16)
    watch.note([15], 0.01)
    assert watch.pace.prefill_tokens_per_s == 0.0
    watch.note([16], 0.01)
    assert watch.pace.prefill_tokens_per_s == pytest.approx(1600.0)


def test_a_step_without_duration_is_not_counted() -> None:
    watch = Stopwatch()
    watch.note([4], 0.0)
    assert watch.pace == Pace()
