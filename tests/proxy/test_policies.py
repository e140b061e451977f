import random as randomness
from collections import Counter

import pytest

from common.messages import Pace
from proxy import policies
from proxy.fleet import Candidate, Need
from proxy.policies import DECODE, PICKS, PREFILL
from proxy.router import Router
from tests.proxy.test_router import NEED, candidate, snapshot


def draws(rng: randomness.Random) -> Need:
    return NEED._replace(draws=(rng.random(), rng.random()))


def test_round_robin_takes_turns() -> None:
    workers = [
        candidate("a", last_used=3),
        candidate("b", last_used=1, queued_tokens=900),
        candidate("c", last_used=2),
    ]
    assert policies.round_robin(workers, NEED, PREFILL).incarnation == "b"


def test_random_takes_all_equally() -> None:
    rng = randomness.Random(1)
    workers = [candidate(name) for name in "abcd"]
    counts = Counter(policies.random(workers, draws(rng), DECODE).incarnation for _ in range(4000))
    assert all(850 < counts[name] < 1150 for name in "abcd")


def test_power_of_two_never_takes_the_most_loaded_and_draws_two_different_ones() -> None:
    rng = randomness.Random(2)
    workers = [candidate(name, num_sequences=load) for load, name in enumerate("abcd")]
    counts = Counter(policies.power_of_two(workers, draws(rng), DECODE).incarnation for _ in range(4000))
    assert counts["d"] == 0
    assert counts["a"] > counts["b"] > counts["c"] > 500
    assert policies.power_of_two(workers[:1], NEED, DECODE) == workers[0]


def test_prefix_aware_takes_the_longest_match_among_those_that_are_not_behind() -> None:
    need = NEED._replace(overlap={"warm": 5, "tepid": 2})
    cold, tepid, warm = (
        candidate("cold"),
        candidate("tepid", queued_tokens=90),
        candidate("warm", queued_tokens=100),
    )
    assert policies.prefix_aware([cold, tepid, warm], need, PREFILL) == warm
    swamped = warm._replace(queued_tokens=101)
    assert policies.prefix_aware([cold, tepid, swamped], need, PREFILL) == tepid
    assert policies.prefix_aware([cold, candidate("colder", queued_tokens=1)], NEED, PREFILL) == cold


def test_a_session_stays_with_its_worker_and_only_those_of_a_lost_one_move() -> None:
    workers = [candidate(f"i{index}", name=f"prefill-{index}") for index in range(8)]

    def places(some: list[Candidate]) -> dict[str, str]:
        needs = [NEED._replace(session=f"s{number}") for number in range(400)]
        return {need.session: policies.consistent_hash(some, need, PREFILL).name for need in needs}

    before, after = places(workers), places(workers[1:])
    assert all(count > 20 for count in Counter(before.values()).values())
    assert all(after[session] == place for session, place in before.items() if place != "prefill-0")
    restarted = [worker._replace(incarnation=f"new{index}") for index, worker in enumerate(workers)]
    assert places(restarted[::-1]) == before


def test_without_a_session_the_least_loaded_is_taken() -> None:
    workers = [candidate("a", num_sequences=2), candidate("b")]
    assert policies.consistent_hash(workers, NEED, DECODE).incarnation == "b"


@pytest.mark.parametrize("prefill", [*PICKS, "cost"])
@pytest.mark.parametrize("decode", [*PICKS, "cost"])
def test_policies_of_both_sides_go_together(prefill: str, decode: str) -> None:
    pace = Pace(1000.0, 0.01)
    fleet = snapshot(
        [candidate("p1", pace=pace), candidate("p2", queued_tokens=9000, pace=pace)],
        [candidate("d1", pace=pace), candidate("d2", num_sequences=30, pace=pace)],
    )
    need = NEED._replace(overlap={"p1": 3, "d1": 2}, draws=(0.1, 0.1), session="s")
    choice = Router(prefill, decode, "always").choose(fleet, need)
    assert choice is not None
    assert choice.prefill in ("p1", "p2")
    assert choice.decode in ("d1", "d2")
    least = ("least_loaded", "power_of_two", "prefix_aware", "cost")
    assert choice.prefill == "p1" or prefill not in least
    assert choice.decode == "d1" or decode not in least
