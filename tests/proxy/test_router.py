from collections.abc import Sequence
from typing import Any

from proxy.fleet import UNLIMITED, fleet_of
from proxy.router import MAX_BLAME, Candidate, Choice, Need, Router, Snapshot


def candidate(incarnation: str, **changes: Any) -> Candidate:
    fresh = Candidate(
        incarnation,
        queued_tokens=0,
        num_sequences=0,
        free_blocks=100,
        block_size=16,
        max_sequence_tokens=UNLIMITED,
        trusted=True,
        last_used=0,
    )
    return fresh._replace(**changes)


def snapshot(
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    expects_prefill: bool = True,
    fallback: bool = True,
) -> Snapshot:
    return Snapshot(prefill, decode, expects_prefill, fallback, fleet_of(prefill, decode))


NEED = Need(num_tokens=100, max_total_tokens=200)
least_loaded = Router("least_loaded", "least_loaded").choose


def test_takes_the_shortest_queue_and_the_fewest_sequences() -> None:
    prefill = [candidate("p1", queued_tokens=500), candidate("p2", queued_tokens=20)]
    decode = [candidate("d1", num_sequences=1), candidate("d2", num_sequences=4)]
    assert least_loaded(snapshot(prefill, decode), NEED) == Choice("p2", "d1")


def test_among_equals_takes_the_one_used_longest_ago() -> None:
    prefill = [candidate("p1", last_used=7), candidate("p2", last_used=3)]
    decode = [candidate("d1", last_used=2), candidate("d2", last_used=8)]
    assert least_loaded(snapshot(prefill, decode), NEED) == Choice("p2", "d1")


def test_a_decode_worker_without_room_comes_after_one_with_room() -> None:
    decode = [candidate("full", free_blocks=6), candidate("busy", num_sequences=9)]
    assert least_loaded(snapshot([], decode, expects_prefill=False), NEED) == Choice(None, "busy")


def test_nothing_is_sent_where_it_can_never_fit() -> None:
    small, large = candidate("small", max_sequence_tokens=199), candidate("large", max_sequence_tokens=200)
    assert least_loaded(snapshot([], [small, large], expects_prefill=False), NEED) == Choice(None, "large")
    assert least_loaded(snapshot([], [small], expects_prefill=False), NEED) is None


def test_a_request_whose_handovers_failed_is_served_by_one_worker_if_that_is_allowed() -> None:
    need = NEED._replace(hands_over=False)
    pair = [candidate("p")], [candidate("d")]
    assert least_loaded(snapshot(*pair), need) == Choice(None, "d", fallback=True)
    assert least_loaded(snapshot(*pair, fallback=False), need) == Choice("p", "d")


def test_without_prefill_workers_decode_workers_stand_in_and_that_is_told() -> None:
    decode = [candidate("d")]
    assert least_loaded(snapshot([], decode), NEED) == Choice(None, "d", fallback=True)
    assert least_loaded(snapshot([], decode, expects_prefill=False), NEED) == Choice(
        None, "d", fallback=False
    )
    assert least_loaded(snapshot([], decode, fallback=False), NEED) is None


def test_a_distrusted_prefill_worker_is_left_out_and_a_distrusted_decode_worker_comes_last() -> None:
    bad, good = candidate("bad", trusted=False), candidate("good", num_sequences=50, queued_tokens=9000)
    assert least_loaded(snapshot([bad], [good]), NEED) == Choice(None, "good", fallback=True)
    assert least_loaded(snapshot([bad, good], [bad, good]), NEED) == Choice("good", "good")
    assert least_loaded(snapshot([good], [bad]), NEED) == Choice("good", "bad")


def test_a_retry_avoids_whom_the_failure_speaks_against() -> None:
    both = [candidate("a"), candidate("b", num_sequences=5, queued_tokens=50)]
    need = NEED._replace(blame={"a": 1})
    assert least_loaded(snapshot(both, both), need) == Choice("b", "b")
    need = NEED._replace(blame={"a": MAX_BLAME})
    assert least_loaded(snapshot(both[:1], both[:1]), need) == Choice(None, "a", fallback=True)


def test_nobody_to_decode_is_no_choice() -> None:
    assert least_loaded(snapshot([candidate("p")], []), NEED) is None
