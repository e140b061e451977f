import pytest

from common.messages import Role, Sampling
from proxy.attempt import Attempt
from proxy.request import Request
from proxy.split import segments_of, split_of
from proxy.worker import Worker
from tests.proxy.scripted import status_of

TOLD = {
    "queue_s": 0.5,
    "prefill_s": 2.0,
    "prefill_kernel_s": 1.5,
    "prefill_cache_s": 0.25,
    "decode_wait_s": 0.25,
    "first_step_s": 0.5,
    "decode_s": 3.0,
    "decode_kernel_s": 3.0,
    "decode_cache_s": 0.125,
}


def worker(role: Role) -> Worker:
    return Worker(role.encode(), status_of(role, role), 0.0)


def ended_request(prefill: Worker | None, timings: dict[str, float]) -> Request:
    """Arrived at 10, dispatched at 11, first token at 14, handed over at 15."""
    request = Request("r", (1, 2), Sampling(max_tokens=3), deadline=1e12)
    attempt = Attempt("r", 0, prefill, worker("decode"), 0, 1e12)
    attempt.began_at, attempt.first_token_at = 11.0, 14.0
    attempt.handed_over_at = 15.0 if prefill else 0.0
    attempt.timings, attempt.finished = timings, True
    attempt.close()
    request.attempt, request.num_attempts, request.dispatched_at = attempt, 1, 11.0
    return request


def seconds_of(request: Request, ended_at: float) -> dict[str, float]:
    segments = segments_of(request, 10.0, ended_at)
    ends = [segment.start_s + segment.seconds for segment in segments]
    assert [segment.start_s for segment in segments] == [0.0, *ends[:-1]]
    assert ends[-1] == pytest.approx(ended_at - 10.0)
    return {segment.name: segment.seconds for segment in segments}


async def test_segments_of_a_request_that_was_handed_over() -> None:
    request = ended_request(worker("prefill"), TOLD)
    parts = {"route": 1.0, "queue": 1.0, "prefill": 2.0, "transfer": 1.0, "wait": 0.25, "decode": 3.75}
    assert seconds_of(request, 19.0) == parts


async def test_the_split_adds_up_to_the_latency() -> None:
    split = split_of(ended_request(worker("prefill"), TOLD), 10.0, 19.0)
    assert split == {"kernel_s": 4.5, "cache_s": 0.375, "transfer_s": 1.0, "scheduling_s": 3.125}
    assert sum(split.values()) == 9.0


async def test_the_prefill_workers_own_figure_of_the_hand_over_counts() -> None:
    request = ended_request(worker("prefill"), TOLD | {"exposed_transfer_s": 0.5})
    split = split_of(request, 10.0, 19.0)
    assert split["transfer_s"] == 0.5 and sum(split.values()) == 9.0


async def test_a_decode_worker_alone_hands_nothing_over() -> None:
    request = ended_request(None, TOLD)
    assert seconds_of(request, 19.0) == {"route": 1.0, "queue": 1.0, "prefill": 2.0, "decode": 5.0}
    assert split_of(request, 10.0, 19.0)["transfer_s"] == 0.0


async def test_failed_attempts_are_told_apart() -> None:
    request = ended_request(worker("prefill"), TOLD)
    request.num_attempts, request.dispatched_at = 2, 10.5
    assert seconds_of(request, 19.0)["retry"] == 0.5
    assert sum(split_of(request, 10.0, 19.0).values()) == 9.0


async def test_a_request_that_never_got_a_worker_has_a_route_only() -> None:
    request = Request("r", (1, 2), Sampling(max_tokens=3), deadline=1e12)
    assert seconds_of(request, 19.0) == {"route": 9.0}
    assert split_of(request, 10.0, 19.0) == {}


async def test_a_request_without_a_token_waited() -> None:
    request = ended_request(worker("prefill"), {})
    assert request.attempt is not None
    request.attempt.first_token_at, request.attempt.finished = 0.0, False
    assert seconds_of(request, 19.0) == {"route": 1.0, "queue": 8.0}
    assert split_of(request, 10.0, 19.0) == {}
