import pytest

from common.messages import Pace
from proxy import cost
from proxy.fleet import Candidate, Need, Targets, fleet_of
from proxy.router import Router
from tests.proxy.test_router import candidate, snapshot

PACE = Pace(prefill_tokens_per_s=1000.0, step_s=0.01)
NEED = Need(num_tokens=1000, max_total_tokens=1100)
choose = Router().choose


def worker(name: str, **changes: object) -> Candidate:
    fields = {"pace": PACE, "block_bytes": 1_000_000, "name": name} | changes
    return candidate(name, **fields)


def test_predicts_the_first_token_from_queue_speed_and_what_is_cached() -> None:
    need = NEED._replace(overlap={"p": 25})
    p, d = worker("p", queued_tokens=500), worker("d", num_sequences=3)
    told = cost.predict(p, d, need, fleet_of([p], [d]))
    assert told.num_cached == 400
    assert told.ttft_s == pytest.approx(0.01 + (500 + 600) / 1000)
    assert told.itl_s == pytest.approx(0.01)
    assert told.transfer_s == pytest.approx(63e6 / cost.LINK_BYTES_PER_S + 0.01)
    assert told.cost_s == pytest.approx(told.ttft_s + told.transfer_s + cost.RECOMPUTING * 0.6 + 3 * 0.01)


def test_a_prompt_known_as_a_whole_still_has_its_last_token_computed() -> None:
    need = NEED._replace(num_tokens=32, overlap={"p": 2})
    assert need.num_lacking(worker("p")) == 16


def test_a_longer_queue_is_worth_it_where_enough_is_cached() -> None:
    fleet = snapshot([worker("cold"), worker("warm", queued_tokens=600)], [worker("d")])
    assert choose(fleet, NEED._replace(overlap={"warm": 20})).prefill == "warm"  # type: ignore[union-attr]
    assert choose(fleet, NEED._replace(overlap={"warm": 15})).prefill == "cold"  # type: ignore[union-attr]


def test_a_faster_worker_is_preferred_but_a_slow_measurement_does_not_rule_a_worker_out() -> None:
    fast, slow = worker("fast"), worker("slow", pace=Pace(100.0, 0.01))
    fleet = snapshot([fast, slow], [worker("d")])
    assert choose(fleet, NEED).prefill == "fast"  # type: ignore[union-attr]
    busy = snapshot([fast._replace(queued_tokens=9000), slow], [worker("d")])
    assert choose(busy, NEED).prefill == "slow"  # type: ignore[union-attr]


def test_blocks_that_the_decode_worker_has_need_no_transfer() -> None:
    fleet = snapshot(
        [worker("p", links={"d1": 1e8, "d2": 1e8})], [worker("d1"), worker("d2", num_sequences=8)]
    )
    assert choose(fleet, NEED).decode == "d1"  # type: ignore[union-attr]
    assert choose(fleet, NEED._replace(overlap={"d2": 50})).decode == "d2"  # type: ignore[union-attr]


def test_a_measured_link_counts_more_than_what_labels_promise() -> None:
    near, far = {"host": "a", "rack": "r"}, {"host": "b", "rack": "r"}
    decode = [worker("here", locality=near, num_sequences=2), worker("there", locality=far)]
    assert choose(snapshot([worker("p", locality=near)], decode), NEED).decode == "here"  # type: ignore[union-attr]
    measured = worker("p", locality=near, links={"here": 1e9, "there": 9e8})
    assert choose(snapshot([measured], decode), NEED).decode == "there"  # type: ignore[union-attr]


def test_a_worker_further_away_is_dearer_label_by_label() -> None:
    p = worker("p", locality={"host": "a", "rack": "r"})
    places: list[dict[str, str]] = [{"host": "a", "rack": "r"}, {"host": "b", "rack": "r"}, {"host": "b"}]
    decode = [worker("d", locality=place, pace=Pace()) for place in places]
    times = [cost.transfer_time(p, d, NEED, fleet_of([], [])) for d in decode]
    assert times == [pytest.approx(times[0] * cost.DISTANCE**distance) for distance in range(3)]


def test_short_and_cached_prompts_stay_where_they_are_decoded_and_long_ones_do_not() -> None:
    fleet = snapshot([worker("p")], [worker("d")])
    short = NEED._replace(num_tokens=15)
    assert choose(fleet, short).prefill is None  # type: ignore[union-attr]
    assert not choose(fleet, short).fallback  # type: ignore[union-attr]
    assert choose(fleet, NEED).prefill == "p"  # type: ignore[union-attr]
    assert choose(fleet, NEED._replace(overlap={"d": 62})).prefill is None  # type: ignore[union-attr]


def test_a_decode_worker_prefills_nothing_that_breaks_the_inter_token_target() -> None:
    fleet = snapshot([worker("p", queued_tokens=50_000)], [worker("d")])
    need = NEED._replace(num_tokens=100)
    assert choose(fleet, need._replace(targets=Targets(itl_s=0.2))).prefill is None  # type: ignore[union-attr]
    assert choose(fleet, need._replace(targets=Targets(itl_s=0.1))).prefill == "p"  # type: ignore[union-attr]


def test_slow_steps_are_no_leave_to_make_them_slower_still() -> None:
    slow = Pace(prefill_tokens_per_s=1000.0, step_s=0.09)
    fleet = snapshot([worker("p", pace=slow, queued_tokens=5000)], [worker("d", pace=slow)])
    need = NEED._replace(num_tokens=100)
    assert choose(fleet, need).prefill == "p"  # type: ignore[union-attr]
    assert choose(fleet, need._replace(num_tokens=9)).prefill is None  # type: ignore[union-attr]


def test_streams_that_would_be_delayed_speak_against_prefilling_beside_them() -> None:
    need = NEED._replace(num_tokens=15)
    busy = snapshot([worker("p", block_bytes=1)], [worker("d", num_sequences=20, block_bytes=1)])
    assert choose(busy, need).prefill == "p"  # type: ignore[union-attr]


def test_a_prefill_worker_on_the_cores_of_a_decode_worker_spares_its_streams_nothing() -> None:
    need = NEED._replace(num_tokens=15)
    p, d = worker("p", block_bytes=1), worker("d", num_sequences=20, block_bytes=1)
    apart = snapshot([p._replace(seat="a")], [d._replace(seat="b")])
    assert choose(apart, need).prefill == "p"  # type: ignore[union-attr]
    together = snapshot([p._replace(seat="a")], [d._replace(seat="a")])
    assert choose(together, need).prefill is None  # type: ignore[union-attr]


def test_prompts_are_computed_where_the_cores_have_least_to_do() -> None:
    prefill = [worker("p1", seat="a"), worker("p2", seat="b", last_used=1)]
    streams = [worker("d1", seat="a", num_sequences=3), worker("d2", seat="b")]
    assert choose(snapshot(prefill, streams), NEED).prefill == "p2"  # type: ignore[union-attr]
    prompts = [worker("d1", seat="a", queued_tokens=100), worker("d2", seat="b", num_sequences=1)]
    fleet = snapshot(prefill, prompts)
    told = [cost.predict(p, prompts[1], NEED, fleet.fleet).ttft_s for p in prefill]
    assert told[0] - told[1] == pytest.approx(0.1)


def test_nothing_is_prefilled_where_it_is_decoded_before_anything_is_measured() -> None:
    fleet = snapshot([worker("p", pace=Pace())], [worker("d", pace=Pace())])
    assert choose(fleet, NEED._replace(num_tokens=3)).prefill == "p"  # type: ignore[union-attr]


def test_always_and_never_are_obeyed() -> None:
    fleet = snapshot([worker("p")], [worker("d")])
    short = NEED._replace(num_tokens=15)
    assert Router(disaggregate="always").choose(fleet, short).prefill == "p"  # type: ignore[union-attr]
    assert Router(disaggregate="never").choose(fleet, NEED).prefill is None  # type: ignore[union-attr]
    assert Router().choose(fleet._replace(allows_fallback=False), short).prefill == "p"  # type: ignore[union-attr]


def test_equal_pairs_are_used_in_turns() -> None:
    fleet = snapshot([worker("p1", last_used=2), worker("p2", last_used=1)], [worker("d")])
    assert choose(fleet, NEED).prefill == "p2"  # type: ignore[union-attr]


def test_an_explanation_names_every_pair_and_marks_the_choice() -> None:
    fleet = snapshot([worker("p1", queued_tokens=900), worker("p2")], [worker("d")])
    choice = choose(fleet, NEED)
    assert choice is not None
    lines = Router().explain(fleet, NEED, choice).splitlines()
    assert len(lines) == 1 + 3
    assert [line for line in lines if line.startswith("*")] == [next(li for li in lines if "p2 > d" in li)]


def test_workers_that_do_not_tell_their_cores_share_none() -> None:
    p, d = worker("p", queued_tokens=100), worker("d", num_sequences=3)
    apart = snapshot([p], [d])
    assert cost.predict(p, d, NEED, apart.fleet) == cost.predict(p, d, NEED, snapshot([p], []).fleet)
    one_seat = snapshot([p, worker("q", seat="a")], [d, worker("e", seat="a", num_sequences=2)])
    assert cost.work_there(d, one_seat.fleet, 3) == (0, 3)
    assert cost.work_there(worker("q", seat="a"), one_seat.fleet) == (0, 2)
