from common.sequence import Cost
from common.timings import timings_of
from tests.common.toy import make_sequence


def test_an_engine_that_prefills_tells_of_queue_prefill_and_decode() -> None:
    sequence = make_sequence("r", [1])
    assert timings_of(sequence) == {}
    sequence.marks = {"queued": 1.0, "scheduled": 3.0}
    assert timings_of(sequence) == {"queue_s": 2.0}
    sequence.marks |= {"first_token": 7.0, "finished": 15.0}
    sequence.prefill_cost = Cost(kernel_s=3.5, cache_s=0.25)
    sequence.decode_cost = Cost(kernel_s=6.0, cache_s=0.5)
    assert timings_of(sequence) == {
        "queue_s": 2.0,
        "prefill_s": 4.0,
        "prefill_kernel_s": 3.5,
        "prefill_cache_s": 0.25,
        "decode_s": 8.0,
        "decode_kernel_s": 6.0,
        "decode_cache_s": 0.5,
    }


def test_an_engine_that_adopts_tells_of_the_wait_and_its_first_step() -> None:
    sequence = make_sequence("r", [1])
    sequence.marks = {"adopted": 1.0, "scheduled": 1.5, "first_token": 2.0, "finished": 4.0}
    sequence.decode_cost = Cost(kernel_s=2.25, cache_s=0.125)
    assert timings_of(sequence) == {
        "decode_wait_s": 0.5,
        "first_step_s": 0.5,
        "decode_s": 2.0,
        "decode_kernel_s": 2.25,
        "decode_cache_s": 0.125,
    }
