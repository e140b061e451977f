from collections import Counter
from pathlib import Path

import pytest

from tests.faults import chaos, schedule
from tests.faults.client import Verdict
from tests.faults.cluster import Usage
from tests.faults.load import Score
from tests.faults.schedule import Kind

WORKERS = ("p1", "p2", "d1", "d2")


def test_a_seed_draws_the_same_faults_again() -> None:
    drawn = schedule.draw(7, 600, WORKERS, kill_every_s=5, others_every_s=3)
    assert drawn == schedule.draw(7, 600, WORKERS, kill_every_s=5, others_every_s=3)
    assert drawn != schedule.draw(8, 600, WORKERS, kill_every_s=5, others_every_s=3)
    assert {fault.kind for fault in drawn} == set(Kind)


def test_kills_come_in_turns_at_a_steady_pace_and_stop_before_the_end() -> None:
    kills = [f for f in schedule.draw(1, 100, WORKERS, 5, 3) if f.kind is Kind.KILL]
    assert [kill.at_s for kill in kills] == [5.0 * turn for turn in range(1, 16)]
    assert set(Counter(kill.target for kill in kills[:12]).values()) == {3}


def test_relayed_faults_strike_decode_workers_only() -> None:
    relayed = {Kind.CUT, Kind.FLIP, Kind.SLOW, Kind.STALL}
    drawn = schedule.draw(2, 1000, WORKERS, 5, 1)
    assert {fault.target for fault in drawn if fault.kind in relayed} == {"d1", "d2"}


@pytest.mark.parametrize("bad", [Verdict.WRONG, Verdict.HUNG])
def test_one_wrong_or_hung_reply_fails_the_run(bad: Verdict) -> None:
    score = Score(Counter({Verdict.EQUAL: 99, Verdict.ERROR: 3}))
    assert chaos.Result(score, Counter(), [1.0, 3.0], []).passed
    score.verdicts[bad] += 1
    result = chaos.Result(score, Counter(), [1.0, 3.0], [])
    assert not result.passed
    assert f"{bad.value}=1" in result.line()
    assert "recovery_p50_s=2.0 recovery_max_s=3.0" in result.line()


def test_of_a_hundred_recoveries_all_but_one_are_within_the_ninety_ninth_percentile() -> None:
    assert chaos.percentile([float(value) for value in range(100, 0, -1)], 0.99) == 99.0
    assert chaos.percentile([2.0, 1.0], 0.99) == 2.0
    assert chaos.percentile([], 0.99) == 0.0


def test_a_leak_fails_the_run() -> None:
    usage = Usage(pid=1, num_fds=10, num_threads=5, num_mappings=100, rss_bytes=1 << 28, cpu_s=1.0)
    found = chaos.leaks({"d1": usage}, {"d1": usage._replace(num_fds=10 + chaos.SLACK_FDS + 1)})
    assert found and "num_fds" in found[0]
    assert not chaos.leaks({"d1": usage}, {"d1": usage._replace(num_fds=11, cpu_s=9.0)})
    assert not chaos.Result(Score(), Counter(), [], found).passed


@pytest.mark.timeout(180)
async def test_a_short_storm_leaves_nothing_wrong_hung_or_leaked(tmp_path: Path) -> None:
    options = chaos.Options(seconds=8.0, seed=11, kill_every_s=1.5, others_every_s=0.8)
    result = await chaos.run(options, tmp_path)
    assert result.passed, "\n".join([result.line(), *result.score.examples, *result.leaks])
    assert result.num_faults[Kind.KILL] >= 3
    assert result.score.verdicts[Verdict.EQUAL] > 20
