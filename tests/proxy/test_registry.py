import time

import msgspec
import pytest

from common.messages import BlocksRemoved, BlocksStored, Layout, Status
from proxy.registry import Registry
from tests.proxy.scripted import LAYOUT, LOAD, MODEL, status_of


def changed_layout(**changes: object) -> Layout:
    return msgspec.structs.replace(LAYOUT, **changes)


def registry_of(*statuses: Status, allows_fallback: bool = True) -> Registry:
    registry = Registry(dead_after_s=2.0, allows_fallback=allows_fallback)
    for status in statuses:
        registry.hear(status.incarnation.encode(), status)
    return registry


def test_the_first_status_registers_a_worker_and_asks_for_a_welcome() -> None:
    registry = Registry(dead_after_s=2.0)
    heard = registry.hear(b"d.0", status_of("decode", "d"))
    assert heard.needs_answer
    assert heard.worker.takes_work
    assert not registry.hear(b"d.0", status_of("decode", "d")).needs_answer


def test_an_incompatible_worker_is_refused_once_with_the_field_named_and_never_used() -> None:
    registry = registry_of(status_of("decode", "d"))
    odd = status_of("prefill", "p", layout=changed_layout(dtype="float16"))
    heard = registry.hear(b"p.0", odd)
    assert heard.needs_answer
    assert "dtype: 'float32' here, 'float16' there" in heard.worker.reason
    assert not registry.hear(b"p.0", odd).needs_answer
    assert registry.ready("prefill") == []
    assert registry.snapshot().prefill == []
    assert not registry.snapshot().expects_prefill


def test_a_refused_worker_is_taken_once_those_it_differs_from_are_gone() -> None:
    registry = registry_of(status_of("decode", "d"))
    odd = status_of("decode", "e", layout=changed_layout(block_size=32))
    registry.hear(b"e.0", odd)
    registry.forget(b"d", "test")
    heard = registry.hear(b"e.0", odd)
    assert heard.needs_answer
    assert heard.worker.takes_work


def test_a_worker_of_another_model_is_refused() -> None:
    registry = Registry(2.0, fingerprint="tiny")
    other = msgspec.structs.replace(MODEL, fingerprint="huge")
    assert "model_fingerprint" in registry.hear(b"d.0", status_of("decode", "d", model=other)).worker.reason


def test_a_new_session_of_a_worker_replaces_the_old_one() -> None:
    registry = registry_of()
    old = registry.hear(b"d.0", status_of("decode", "d")).worker
    heard = registry.hear(b"d.1", status_of("decode", "d"))
    assert heard.lost == (old,)
    assert [worker.peer for worker in registry] == [b"d.1"]


def test_a_silent_worker_gets_no_work_and_is_welcomed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(status_of("decode", "d"))
    now = time.monotonic()
    for seconds in (0.5, 1.0, 1.5, 2.5):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        silent = registry.sweep()
    assert [worker.name for worker in silent] == ["decode-d"]
    assert not registry.serves
    assert registry.hear(b"d", status_of("decode", "d")).needs_answer
    assert registry.serves


def test_a_worker_that_sends_tokens_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(status_of("decode", "d"))
    now = time.monotonic()
    for seconds in (0.5, 1.0, 1.5, 2.5):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        registry.touch(b"d")
        assert registry.sweep() == []


def test_nobody_is_taken_for_silent_because_the_proxy_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(status_of("decode", "d"))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert registry.sweep() == []
    assert registry.serves


def test_readiness_names_the_missing_role() -> None:
    registry = registry_of()
    assert (registry.serves, registry.missing_roles()) == (False, ["decode"])
    registry = registry_of(status_of("prefill", "p"))
    assert (registry.serves, registry.missing_roles()) == (False, ["decode"])
    registry = registry_of(status_of("decode", "d"))
    assert (registry.serves, registry.missing_roles()) == (True, [])
    registry = registry_of(status_of("prefill", "p"), status_of("decode", "d"))
    assert (registry.serves, registry.missing_roles()) == (True, [])
    registry.forget(b"p", "test")
    assert (registry.serves, registry.missing_roles()) == (True, ["prefill"])


def test_without_fallback_a_missing_prefill_worker_is_not_ready() -> None:
    registry = registry_of(status_of("prefill", "p"), status_of("decode", "d"), allows_fallback=False)
    assert registry.serves
    registry.forget(b"p", "test")
    assert not registry.serves


def test_a_draining_worker_gets_no_work() -> None:
    registry = registry_of(status_of("decode", "d", draining=True))
    assert registry.snapshot().decode == []
    assert not registry.serves


@pytest.mark.parametrize("under_way", [False, True])
def test_a_worker_that_has_drained_is_not_called_lost(
    under_way: bool, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_of(status_of("decode", "d", draining=True))
    (worker,) = registry
    if under_way:
        registry.charge(worker, "a request", 10, 10)
    with caplog.at_level("INFO"):
        registry.forget(worker.peer, "the connection ended")
    assert ("is lost: the connection ended" in caplog.text) == under_way
    assert ("has drained and left" in caplog.text) != under_way


def test_load_counts_what_was_sent_since_the_last_report() -> None:
    load = msgspec.structs.replace(LOAD, num_queued_tokens=100, num_running=2, num_free_blocks=50)
    registry = registry_of(status_of("decode", "d", load=load))
    (worker,) = registry
    registry.charge(worker, "r1", 160, 160)
    registry.charge(worker, "r2", 17, 1)
    candidate = worker.candidate(time.monotonic())
    assert candidate.queued_tokens == 261
    assert candidate.num_sequences == 4
    assert candidate.free_blocks == 50 - 12
    registry.settle(worker, "r1")
    registry.settle(worker, "r2")
    assert worker.candidate(time.monotonic()).queued_tokens == 100


def test_a_report_includes_what_was_sent_before_it_but_never_less_than_is_under_way() -> None:
    registry = registry_of(status_of("prefill", "p"))
    (worker,) = registry
    registry.charge(worker, "r1", 500, 500)
    busy = msgspec.structs.replace(LOAD, num_queued_tokens=2000)
    registry.hear(b"p", status_of("prefill", "p", load=busy))
    assert worker.candidate(time.monotonic()).queued_tokens == 2000
    registry.hear(b"p", status_of("prefill", "p"))
    assert worker.candidate(time.monotonic()).queued_tokens == 500


def test_knows_the_longest_sequence_that_fits_anywhere() -> None:
    registry = registry_of(
        status_of("decode", "d1", max_sequence_tokens=100), status_of("decode", "d2", max_sequence_tokens=300)
    )
    assert registry.longest_sequence("decode") == 300
    assert registry.longest_sequence("prefill") is None
    assert registry_of(status_of("decode", "d")).longest_sequence("decode") is None


def test_a_status_that_makes_no_sense_is_refused() -> None:
    registry = registry_of(status_of("decode", "d", layout=changed_layout(block_size=0)))
    (worker,) = registry
    assert "block_size" in worker.reason
    assert registry.snapshot().decode == []


def test_a_new_session_does_not_make_up_for_failures() -> None:
    registry = registry_of()
    worker = registry.hear(b"d.0", status_of("decode", "d")).worker
    worker.breaker.failed("r", 0.0)
    assert registry.hear(b"d.1", status_of("decode", "d")).worker.breaker is worker.breaker


def test_what_was_computed_is_no_load_any_more_but_still_needs_room() -> None:
    registry = registry_of(status_of("decode", "d"))
    (worker,) = registry
    registry.charge(worker, "r1", 160, 100)
    worker.computed("r1")
    candidate = worker.candidate(time.monotonic())
    assert (candidate.queued_tokens, candidate.num_sequences) == (0, 1)
    assert candidate.free_blocks == LOAD.num_free_blocks - 10


def test_blocks_of_a_worker_are_known_until_it_is_lost_or_begins_anew() -> None:
    registry = registry_of(status_of("decode", "d"), status_of("prefill", "p"))
    registry.hear_blocks(b"d", BlocksStored((b"1", b"2"), is_first=True))
    registry.hear_blocks(b"p", BlocksStored((b"1",), is_first=True))
    registry.hear_blocks(b"d", BlocksRemoved((b"2",)))
    registry.hear_blocks(b"stranger", BlocksStored((b"1",)))
    assert registry.index.overlap([b"1", b"2"]) == {"d": 1, "p": 1}
    registry.hear_blocks(b"d", BlocksStored((b"3",), is_first=True))
    assert registry.index.overlap([b"1"]) == {"p": 1}
    registry.forget(b"p", "gone")
    assert registry.index.overlap([b"1"]) == {}
    registry.hear(b"d.1", status_of("decode", "d"))
    assert registry.index.overlap([b"3"]) == {}


def test_a_refused_worker_is_not_asked_for_blocks() -> None:
    registry = registry_of(
        status_of("decode", "d"), status_of("decode", "odd", layout=changed_layout(dtype="x"))
    )
    registry.hear_blocks(b"odd", BlocksStored((b"1",), is_first=True))
    assert registry.index.overlap([b"1"]) == {}
