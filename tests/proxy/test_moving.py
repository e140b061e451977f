import pytest

from proxy.moving import Moving


def test_percentiles_are_those_of_the_last_seconds() -> None:
    moving = Moving()
    for index in range(100):
        moving.add((index + 1) / 1000, 100.0 + index / 10)
    p50, p99 = moving.percentiles(109.95, 60, (0.5, 0.99))
    assert p50 == pytest.approx(0.050, rel=0.03)
    assert p99 == pytest.approx(0.099, rel=0.03)
    late, last = moving.percentiles(109.95, 5, (0.01, 1.0))
    assert late == pytest.approx(0.051, rel=0.03)
    assert last == pytest.approx(0.100, rel=0.03)


def test_what_is_long_ago_counts_no_more() -> None:
    moving = Moving()
    moving.add(3.0, 100.0)
    assert moving.percentiles(200.0, 60, (0.5,)) == [None]
    assert moving.rate(200.0, 60) == 0


def test_rates_are_by_second() -> None:
    moving = Moving()
    for index in range(40):
        moving.add(0.1, 100.0 + index / 4, amount=2.0)
    assert moving.rate(109.99, 10) == pytest.approx(4, rel=0.01)
    assert moving.amount_rate(109.99, 10) == pytest.approx(8, rel=0.01)


def test_zero_is_a_value_too() -> None:
    moving = Moving()
    moving.add(0.0, 1.0)
    assert moving.percentiles(1.0, 10, (0.5,))[0] == pytest.approx(0.0, abs=1e-6)
