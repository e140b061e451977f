import asyncio
import time

import pytest

from common.messages import FinishReason, TokenLogprob, Tokens, WorkerError
from proxy import attempt as attempt_module
from proxy.attempt import Attempt, AttemptFailed, Batch
from proxy.worker import Worker
from tests.proxy.scripted import WAIT_S, status_of

P, D = b"p.0", b"d.0"


def new_attempt(with_prefill: bool = True, num_known: int = 0, wants_logprobs: bool = False) -> Attempt:
    prefill = Worker(P, status_of("prefill", "p"), time.monotonic())
    decode = Worker(D, status_of("decode", "d"), time.monotonic())
    deadline = asyncio.get_running_loop().time() + WAIT_S
    return Attempt("r", 0, prefill if with_prefill else None, decode, num_known, deadline, wants_logprobs)


def said(start: int, text: bytes, finish: FinishReason | None = None, **more: object) -> Tokens:
    return Tokens("r", 0, start, tuple(text), finish_reason=finish, **more)  # type: ignore[arg-type]


async def heard(attempt: Attempt) -> Batch:
    return await asyncio.wait_for(attempt.next(), WAIT_S)


async def test_tokens_of_both_workers_make_one_output() -> None:
    attempt = new_attempt()
    assert attempt.receive(P, said(0, b"a"))
    assert (await heard(attempt)).token_ids == list(b"a")
    assert attempt.receive(D, said(0, b"a"))
    assert attempt.receive(D, said(1, b"b", "stop"))
    assert await heard(attempt) == Batch(list(b"b"), [], "stop")
    assert attempt.finished


async def test_the_decode_worker_may_be_heard_first() -> None:
    attempt = new_attempt()
    attempt.receive(D, said(0, b"a"))
    attempt.receive(D, said(1, b"b"))
    assert not attempt.receive(P, said(0, b"a"))
    attempt.receive(D, said(2, b"c", "length"))
    assert await heard(attempt) == Batch(list(b"abc"), [], "length")


async def test_what_is_ahead_waits_for_what_is_missing() -> None:
    attempt = new_attempt(with_prefill=False)
    attempt.receive(D, said(2, b"cd"))
    attempt.receive(D, said(4, b"e", "stop"))
    attempt.receive(D, said(0, b"abc"))
    assert await heard(attempt) == Batch(list(b"abcde"), [], "stop")


async def test_a_gap_that_does_not_close_fails_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "GAP_TIMEOUT_S", 0.05)
    attempt = new_attempt(with_prefill=False)
    attempt.receive(D, said(0, b"a"))
    attempt.receive(D, said(2, b"c"))
    assert (await heard(attempt)).token_ids == list(b"a")
    with pytest.raises(AttemptFailed, match="never came") as failed:
        await heard(attempt)
    assert failed.value.error.retryable


async def test_messages_ahead_of_a_gap_are_bounded() -> None:
    attempt = new_attempt(with_prefill=False)
    for index in range(attempt_module.MAX_HELD_MESSAGES + 1):
        attempt.receive(D, said(2 + 2 * index, b"x"))
    with pytest.raises(AttemptFailed, match="too many"):
        await heard(attempt)


async def test_a_later_attempt_goes_on_from_what_is_known() -> None:
    attempt = new_attempt(num_known=3)
    attempt.receive(P, said(3, b"d"))
    attempt.receive(D, said(3, b"d"))
    attempt.receive(D, said(4, b"e", "length"))
    assert await heard(attempt) == Batch(list(b"de"), [], "length")


async def test_the_prefill_worker_has_no_say_after_the_hand_over() -> None:
    attempt = new_attempt()
    attempt.receive(P, said(0, b"a"))
    attempt.receive(D, said(0, b"a"))
    error = WorkerError("peer_lost", "no Landed")
    assert not attempt.receive(P, said(0, b"", "error", error=error))
    attempt.lose(P)
    attempt.receive(D, said(1, b"b", "stop"))
    assert (await heard(attempt)).finish_reason == "stop"


async def test_the_prefill_worker_is_blamed_with_the_other_when_it_cannot_hand_over() -> None:
    attempt = new_attempt()
    attempt.receive(P, said(0, b"a"))
    attempt.receive(P, said(0, b"", "error", error=WorkerError("peer_lost", "D refuses")))
    assert (await heard(attempt)).token_ids == list(b"a")
    with pytest.raises(AttemptFailed, match="D refuses") as failed:
        await heard(attempt)
    assert [worker.name for worker in failed.value.culprits] == ["prefill-p", "decode-d"]


@pytest.mark.parametrize("lost", [P, D])
async def test_losing_either_worker_before_the_hand_over_is_a_failure(lost: bytes) -> None:
    attempt = new_attempt()
    attempt.lose(b"somebody else")
    attempt.lose(lost)
    with pytest.raises(AttemptFailed, match="is lost"):
        await heard(attempt)


async def test_strangers_have_no_say() -> None:
    attempt = new_attempt()
    assert not attempt.receive(b"x.0", said(0, b"x", "stop"))
    assert not attempt.over


async def test_nothing_counts_after_the_end() -> None:
    attempt = new_attempt(with_prefill=False)
    attempt.receive(D, said(0, b"a", "stop"))
    assert not attempt.receive(D, said(1, b"b"))
    assert not attempt.receive(D, said(0, b"", "error", error=WorkerError("internal", "x")))
    assert await heard(attempt) == Batch(list(b"a"), [], "stop")


async def test_a_worker_that_gives_up_unasked_is_a_failure() -> None:
    attempt = new_attempt(with_prefill=False)
    attempt.receive(D, said(0, b"", "abort"))
    with pytest.raises(AttemptFailed) as failed:
        await heard(attempt)
    assert failed.value.error.retryable


async def test_log_probabilities_stay_with_their_tokens() -> None:
    attempt = new_attempt(wants_logprobs=True)
    first, second = TokenLogprob(97, -0.5), TokenLogprob(98, -0.25)
    attempt.receive(P, said(0, b"a", logprobs=(first,)))
    attempt.receive(D, said(0, b"ab", "stop", logprobs=(first, second)))
    batch = await heard(attempt)
    assert batch.logprobs == [first, second]


async def test_missing_log_probabilities_are_a_failure_and_no_shifted_reply() -> None:
    attempt = new_attempt(wants_logprobs=True)
    attempt.receive(P, said(0, b"a"))
    with pytest.raises(AttemptFailed, match="log-probabilities"):
        await heard(attempt)


async def test_the_deadline_ends_an_attempt() -> None:
    attempt = new_attempt()
    attempt.close()
    late = Attempt("r", 0, None, attempt.decode, 0, asyncio.get_running_loop().time())
    with pytest.raises(AttemptFailed) as failed:
        await heard(late)
    assert failed.value.error.code == "deadline"


async def test_the_prefill_worker_tells_how_long_the_hand_over_took_when_it_is_over() -> None:
    attempt = new_attempt()
    attempt.receive(P, said(0, b"a"))
    attempt.receive(D, said(0, b"a"))
    assert attempt.receive(P, said(0, b"", timings={"exposed_transfer_s": 0.5}))
    assert not attempt.receive(P, said(1, b"x"))
    assert attempt.timings == {"exposed_transfer_s": 0.5}


async def test_timings_and_cached_tokens_of_both_workers_are_kept() -> None:
    attempt = new_attempt()
    attempt.receive(P, said(0, b"a", timings={"queue_s": 1.0}, num_cached_tokens=32))
    attempt.receive(D, said(0, b"ab", "stop", timings={"decode_s": 2.0}))
    assert attempt.timings == {"queue_s": 1.0, "decode_s": 2.0}
    assert attempt.num_cached_tokens == 32
