import pytest

from proxy.admission import RANKS, Admission
from proxy.errors import ApiError


def fill(admission: Admission, key: str) -> int:
    """One by one, as many as there are places for the key."""
    count = 0
    while True:
        try:
            admission.enter(key, 1)
        except ApiError:
            return count
        count += 1


def test_without_several_keys_every_place_is_for_everybody() -> None:
    admission = Admission(num_places=10, num_keys=1)
    assert fill(admission, "0") == 10
    admission.leave("0", 4)
    assert fill(admission, "") == 4


def test_many_sequences_find_places_together_or_not_at_all() -> None:
    admission = Admission(num_places=10, num_keys=0)
    admission.enter("", 8)
    with pytest.raises(ApiError):
        admission.enter("", 3)
    assert admission.num_admitted == 8
    admission.enter("", 2)


def test_a_key_alone_gets_most_places_and_whoever_comes_later_finds_some() -> None:
    admission = Admission(num_places=100, num_keys=3)
    assert fill(admission, "0") == 80
    assert fill(admission, "1") >= 15
    assert fill(admission, "2") >= 3
    assert admission.num_admitted <= 100


def test_places_that_were_left_are_free_for_others() -> None:
    admission = Admission(num_places=100, num_keys=2)
    admission.leave("0", fill(admission, "0"))
    assert fill(admission, "1") == 80


def test_the_smallest_server_still_serves_every_key() -> None:
    admission = Admission(num_places=1, num_keys=2)
    admission.enter("0", 1)
    admission.leave("0", 1)
    admission.enter("1", 1)


def test_a_key_with_many_requests_is_served_after_one_with_few_but_priorities_come_first() -> None:
    admission = Admission(num_places=1000, num_keys=2)
    admission.enter("0", 50)
    admission.enter("1", 1)
    assert admission.priority("1", 0) < admission.priority("0", 0) < admission.priority("1", 1)
    admission.enter("0", 200)
    assert admission.priority("0", 0) < RANKS
    assert Admission(10, 1).priority("", 3) == 3
