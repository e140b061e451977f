from common.metrics import WORKER_METRICS
from common.tally import Tally, tallies


def test_bounds_belong_to_their_buckets() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        tally.observe(value)
    seen = tally.read()
    assert seen.counts == (2, 2, 2)
    assert seen.total == 107.5


def test_what_was_read_does_not_change() -> None:
    tally = Tally((1.0,))
    before = tally.read()
    tally.observe(0.5)
    assert before.counts == (0, 0) and tally.read().counts == (1, 0)


def test_there_is_a_tally_for_every_histogram() -> None:
    histograms = [metric.key for metric in WORKER_METRICS if metric.kind == "histogram"]
    assert list(tallies(WORKER_METRICS)) == histograms
