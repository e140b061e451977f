import math

import pytest

from benchmarks.serve.client import Outcome
from benchmarks.serve.figures import Figures, Targets, bearable_rate, distribution, figures
from benchmarks.serve.generator import Run


def outcome(due_at: float = 0.0, late_s: float = 0.0, **changes: object) -> Outcome:
    """First token after 0.2 s, four more with 0.1 s between them, the end after 0.7 s."""
    sent_at = due_at + late_s
    found = Outcome(
        due_at, sent_at, [sent_at + 0.2 + 0.1 * i for i in range(5)], sent_at + 0.7, num_prompt_tokens=30,
        num_output_tokens=5, num_cached_tokens=10,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_latencies_and_throughput_are_those_of_the_requests() -> None:
    found = figures(Run([outcome(float(i)) for i in range(11)], wall_s=22.0, cpu_s=1.1), Targets())
    for name, seconds in (("ttft_s", 0.2), ("tpot_s", 0.1), ("itl_s", 0.1), ("e2e_s", 0.7)):
        assert getattr(found, name) == pytest.approx(
            dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), seconds)
        )
    assert (found.num_sent, found.num_failed, found.attainment) == (11, 0, 1.0)
    assert found.sent_per_s == pytest.approx(1.0)
    assert found.answered_per_s == found.goodput_per_s == 0.5
    assert (found.prompt_tokens_per_s, found.output_tokens_per_s) == (15.0, 2.5)
    assert found.cached_share == pytest.approx(1 / 3)
    assert found.doubt == ""


def test_failed_requests_have_met_no_target_and_are_in_no_latency() -> None:
    failed = outcome(error="HTTP 500", token_times=[], num_output_tokens=0)
    found = figures(Run([outcome(), failed, failed, outcome()], wall_s=4.0), Targets(ttft_s=1.0))
    assert (found.num_failed, found.errors, found.attainment) == (2, {"HTTP 500": 2}, 0.5)
    assert found.goodput_per_s == 0.5
    assert found.ttft_s["max"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("targets", "met"),
    [
        (Targets(0.21, 0.11, 0.71), True),
        (Targets(ttft_s=0.19), False),
        (Targets(tpot_s=0.09), False),
        (Targets(e2e_s=0.69), False),
    ],
)
def test_a_request_meets_its_targets_only_if_it_meets_all(targets: Targets, met: bool) -> None:
    assert targets and not Targets()
    assert targets.met_by(outcome()) is met


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    one = outcome(token_times=[0.2], num_output_tokens=1)
    found = figures(Run([one], wall_s=1.0), Targets(tpot_s=1e-9))
    assert found.tpot_s == found.itl_s == {} and found.attainment == 1.0


def test_a_run_without_any_answer_has_no_latencies() -> None:
    found = figures(Run(wall_s=1.0), Targets())
    assert found.ttft_s == {} and found.attainment == 0.0


def doubt(late_s: float = 0.0, num_lost: int = 0, cpu_s: float = 0.0) -> str:
    outcomes = [outcome(late_s=late_s if number < 5 else 0.0) for number in range(100)]
    found: Figures = figures(Run(outcomes, num_lost, wall_s=10.0, cpu_s=cpu_s), Targets())
    assert found.num_late == (5 if late_s else 0)
    return found.doubt


def test_a_generator_that_could_not_keep_up_says_so() -> None:
    assert doubt() == ""
    assert doubt(late_s=0.05) == "5 of 100 requests were sent over 10 ms late"
    assert doubt(num_lost=3).startswith("3 requests were never sent")
    assert doubt(cpu_s=9.0) == "the generator itself was busy (90% of a core)"


def test_percentiles_lie_between_the_values() -> None:
    found = distribution([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["p50"] == found["mean"] == 3.0
    assert found["p90"] == pytest.approx(4.6) and found["max"] == 5.0


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(1.0, 1.0), (2.0, 0.95), (4.0, 0.45)], 2.2),  # a tenth of the way from 0.95 to 0.45
        ([(1.0, 1.0), (2.0, 1.0)], 2.0),
        ([(1.0, 0.5), (2.0, 1.0)], None),
        ([(1.0, 0.9)], 1.0),
        ([], None),
    ],
)
def test_the_bearable_rate_is_where_attainment_falls_below_the_share(
    points: list[tuple[float, float]], rate: float | None
) -> None:
    found = bearable_rate(points, 0.9)
    assert found is None if rate is None else found is not None and math.isclose(found, rate)
