import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from common.engine import Engine
from common.messages import Refusal
from common.scheduler import Work
from common.sequence import Sequence, SequenceKey, State, StepOutput
from common.timings import timings_of
from kernels import AttentionBatch, Watch
from tests.common.toy import (
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    ToyModel,
    generate,
    make_engine,
    make_sequence,
    prompt,
    run,
)

PATIENCE_S = 30.0


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def run_together(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    sequences = [make_sequence(f"r{i}", token_ids, **sampling) for i, token_ids in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    run(engine)
    return [output_of(sequence) for sequence in sequences]


# Equality


PROMPTS = [prompt(length, seed=length) for length in (1, 3, 4, 5, 8, 21, 40, 64)]


@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 16, 512])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gives_the_same_tokens_alone_and_batched_and_chunked(
    max_num_batched_tokens: int, block_size: int
) -> None:
    expected = [generate(token_ids) for token_ids in PROMPTS]
    engine = make_engine(
        max_num_batched_tokens=max_num_batched_tokens, block_size=block_size, num_blocks=1024 // block_size
    )
    assert run_together(engine, PROMPTS) == expected


def test_gives_the_same_tokens_cold_and_cached() -> None:
    engine = make_engine()
    cold = run_together(engine, PROMPTS)
    sequences = [make_sequence(f"warm{i}", token_ids) for i, token_ids in enumerate(PROMPTS)]
    for sequence in sequences:
        engine.add(sequence)
    run(engine)
    assert [output_of(sequence) for sequence in sequences] == cold
    assert [s.num_cached_tokens for s in sequences] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]


def test_gives_the_same_tokens_when_sequences_take_blocks_from_each_other() -> None:
    prompts = [prompt(20, seed) for seed in range(6)]
    expected = [generate(token_ids, max_tokens=40) for token_ids in prompts]
    engine = make_engine(num_blocks=24)
    assert run_together(engine, prompts, max_tokens=40) == expected
    assert engine.counters()["preemptions_total"] > 0


def test_gives_the_same_random_tokens_when_sequences_take_blocks_from_each_other() -> None:
    prompts = [prompt(20, seed) for seed in range(6)]
    sampling = {"max_tokens": 40, "temperature": 5.0, "seed": 3, "top_p": 0.9}
    expected = [generate(token_ids, **sampling) for token_ids in prompts]
    assert len(set(map(tuple, expected))) == len(expected)
    engine = make_engine(num_blocks=24, enable_prefix_caching=False)
    assert run_together(engine, prompts, **sampling) == expected
    assert engine.counters()["preemptions_total"] > 0


def test_a_retry_goes_on_where_the_first_attempt_stopped() -> None:
    token_ids = prompt(10)
    expected = generate(token_ids, temperature=4.0, seed=11, max_tokens=12)
    engine = make_engine()
    retry = make_sequence(
        "r",
        token_ids + expected[:5],
        num_prompt_tokens=10,
        temperature=4.0,
        seed=11,
        max_tokens=12,
        attempt=1,
    )
    engine.add(retry)
    run(engine)
    assert output_of(retry) == expected


# Handing over


def hand_over(source: Engine, target: Engine, sequence: Sequence, seen_before: bool = False) -> Sequence:
    """Prefill in one engine, copy the blocks, go on in the other."""
    num_tokens = len(sequence.token_ids)
    source.add(sequence)
    run(source)
    assert sequence.state is State.PARKED
    size = source.layout.block_size
    reservation = target.reserve(num_tokens, tuple(sequence.block_hashes[: num_tokens // size]))
    assert reservation is not None
    num_blocks, skip = -(-num_tokens // size), reservation.num_cached_blocks
    assert skip == (num_tokens // size if seen_before else 0)
    lent = source.lend(sequence, skip, num_blocks - skip)
    assert lent is not None
    payload = b"".join(lent)
    source.take_back(sequence)
    views = target.landing_views(reservation, skip, num_blocks - skip)
    for view in views:
        view[:] = payload[: len(view)]
        payload = payload[len(view) :]
    assert not payload
    if views:
        target.landed(reservation, skip, num_blocks - skip, views)
    assert source.release(sequence.key)
    successor = make_sequence(
        sequence.key.request_id, sequence.token_ids, num_prompt_tokens=sequence.num_prompt_tokens
    )
    successor.sampling = sequence.sampling
    target.adopt(reservation, successor)
    return successor


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 31, 32, 33])
def test_goes_on_in_another_engine_as_if_it_had_started_there(length: int, staged: bool) -> None:
    token_ids = prompt(length)
    source, target = make_engine(staged=staged), make_engine(staged=staged)
    for attempt in range(2):  # the second finds all full blocks there already
        sequence = make_sequence(f"r{attempt}", token_ids, handoff=True)
        successor = hand_over(source, target, sequence, seen_before=attempt > 0)
        run(target)
        assert output_of(successor) == generate(token_ids)
    assert source.load().num_free_blocks == target.load().num_free_blocks == 64


def test_reports_progress_of_a_prompt_to_be_handed_over_after_every_step() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    sequence = make_sequence("r", prompt(20), handoff=True)
    engine.add(sequence)
    seen = []
    while sequence.state is not State.PARKED:
        (output,) = engine.step()
        seen.append((sequence.num_computed, len(output.token_ids), output.finish_reason))
    assert seen == [(8, 0, None), (16, 0, None), (20, 1, None)]


def test_whoever_watches_a_step_is_named_before_it_and_is_in_its_batch() -> None:
    seen: list[Watch | None] = []

    class Watched(ToyModel):
        def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: list[Tensor]) -> Tensor:
            seen.append(batch.watch)
            return super().forward(token_ids, batch, caches)

    watches = [Watch(1, int), None]
    asked: list[list[tuple[int, int]]] = []

    def watcher(works: list[Work]) -> Watch | None:
        asked.append([(work.start, work.num_tokens) for work in works])
        return watches[len(asked) - 1]

    engine = make_engine(Watched(), max_num_batched_tokens=8)
    ended = threading.Event()
    engine.start(lambda outputs: ended.set() if outputs[-1].token_ids else None, watcher)
    engine.add(make_sequence("r", prompt(12), handoff=True))
    assert ended.wait(60.0)
    engine.stop()
    assert asked == [[(0, 8)], [(8, 4)]] and seen == watches


def test_a_first_token_that_ends_the_request_leaves_nothing_to_hand_over() -> None:
    engine = make_engine()
    sequence = make_sequence("r", prompt(9), handoff=True, max_tokens=1)
    engine.add(sequence)
    (output,) = run(engine)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 1
    assert sequence.state is State.FINISHED
    assert engine.load().num_free_blocks == 64


def test_lent_blocks_of_an_aborted_sequence_are_not_reused_until_taken_back() -> None:
    engine = make_engine(num_blocks=8)
    sequence = make_sequence("r", prompt(20), handoff=True)
    engine.add(sequence)
    run(engine)
    views = engine.lend(sequence, 0, 5)
    assert views is not None
    before = b"".join(views)
    assert engine.abort(sequence.key)
    other = make_sequence("other", prompt(21, seed=5))
    engine.add(other)
    engine.step()
    assert other.state is State.WAITING
    assert b"".join(views) == before
    assert engine.lend(sequence, 0, 1) is None
    engine.take_back(sequence)
    run(engine)
    assert output_of(other) == generate(prompt(21, seed=5))


def test_adopts_only_the_tokens_that_were_reserved_for() -> None:
    engine = make_engine()
    other = make_engine()
    sequence = make_sequence("r", prompt(9), handoff=True)
    other.add(sequence)
    run(other)
    reservation = engine.reserve(9, tuple(sequence.block_hashes[:2]))
    assert reservation is not None
    forged = make_sequence("r", [*prompt(9, seed=1), 5], num_prompt_tokens=9)
    with pytest.raises(Refusal, match="not those of the reserved blocks"):
        engine.adopt(reservation, forged)
    engine.cancel(reservation)
    engine.cancel(reservation)
    assert engine.load().num_free_blocks == 64
    with pytest.raises(Refusal, match="given up"):
        engine.adopt(reservation, make_sequence("r", sequence.token_ids, num_prompt_tokens=9))


def test_reserves_nothing_that_could_never_fit() -> None:
    engine = make_engine(num_blocks=4)
    with pytest.raises(Refusal, match="at most 16"):
        engine.reserve(16, (b"",) * 4)
    with pytest.raises(Refusal, match="block hashes"):
        engine.reserve(8, ())
    assert engine.reserve(15, (b"a" * 16,) * 3) is not None
    assert engine.reserve(1, ()) is None


def test_leaves_running_sequences_room_to_grow_when_it_reserves() -> None:
    engine = make_engine(num_blocks=4)
    engine.add(make_sequence("r", prompt(4), max_tokens=4))
    engine.step()
    assert engine.reserve(4, (b"a" * 16,)) is None
    run(engine)
    assert engine.reserve(4, (b"a" * 16,)) is not None


# Ends


def test_ends_where_sampling_says() -> None:
    token_ids = prompt(6)
    tokens = generate(token_ids, max_tokens=20)
    stop = tokens[4]
    assert generate(token_ids, max_tokens=20, stop_token_ids=(stop,)) == tokens[: tokens.index(stop) + 1]
    assert generate(token_ids, max_tokens=3) == tokens[:3]
    delayed = generate(token_ids, max_tokens=20, stop_token_ids=(tokens[0],), min_tokens=7)
    assert tokens[0] not in delayed[:7]


def test_ends_with_the_end_of_sequence_token_unless_told_to_ignore_it() -> None:
    class Ending(ToyModel):
        def logits(self, hidden: Tensor) -> Tensor:
            logits = super().logits(hidden)
            logits[:, EOS] = 1e4
            return logits

    engine = make_engine(Ending())
    sequence = make_sequence("r", prompt(3), ignore_eos=False)
    engine.add(sequence)
    (output,) = run(engine)
    assert (output.token_ids, output.finish_reason) == ((EOS,), "stop")
    ignoring = make_sequence("r", prompt(3), max_tokens=2)
    engine.add(ignoring)
    run(engine)
    assert output_of(ignoring) == [EOS, EOS]


def test_ends_at_the_longest_sequence_that_the_pool_can_hold() -> None:
    engine = make_engine(num_blocks=5)
    assert engine.max_sequence_tokens == 20
    sequence = make_sequence("r", prompt(7), max_tokens=100)
    engine.add(sequence)
    outputs = run(engine)
    assert outputs[-1].finish_reason == "length"
    assert output_of(sequence) == generate(prompt(7), max_tokens=13)


def test_ends_at_the_models_longest_sequence() -> None:
    engine = make_engine(max_model_len=10)
    sequence = make_sequence("r", prompt(7), max_tokens=100)
    engine.add(sequence)
    assert run(engine)[-1].finish_reason == "length"
    assert len(sequence.token_ids) == 10


@pytest.mark.parametrize("handoff", [False, True])
def test_refuses_what_can_never_fit(handoff: bool) -> None:
    engine = make_engine(num_blocks=4, max_model_len=20)
    with pytest.raises(Refusal, match="limit of 20") as refusal:
        engine.add(make_sequence("r", prompt(20), handoff=handoff))
    assert refusal.value.error.code == "invalid"
    with pytest.raises(Refusal, match="the KV cache has 4 blocks of 4 tokens"):
        engine.add(make_sequence("r", prompt(17), handoff=handoff))
    engine.add(make_sequence("r", prompt(16 if handoff else 15), handoff=handoff))
    assert run(engine)[-1].error is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "num_prompt_tokens"),
        ({"token_ids": [VOCAB_SIZE]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"stop_token_ids": (-5,)}, "stop_token_ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"num_logprobs": -1}, "num_logprobs"),
        ({"deadline": float("nan")}, "deadline"),
    ],
)
def test_refuses_by_name_what_would_break_a_step(changes: dict[str, Any], message: str) -> None:
    engine = make_engine()
    with pytest.raises(Refusal, match=message) as refusal:
        engine.add(make_sequence("r", **({"token_ids": [1, 2, 3]} | changes)))
    assert refusal.value.error.code == "invalid"
    assert engine.load().num_waiting == 0


def test_refuses_more_than_the_queue_holds_and_names_that_are_taken() -> None:
    engine = make_engine(max_waiting_seqs=2)
    engine.add(make_sequence("a", prompt(3)))
    with pytest.raises(Refusal, match="here already"):
        engine.add(make_sequence("a", prompt(3)))
    engine.add(make_sequence("b", prompt(3)))
    with pytest.raises(Refusal) as refusal:
        engine.add(make_sequence("c", prompt(3)))
    assert refusal.value.error.code == "overloaded"
    run(engine)
    engine.add(make_sequence("a", prompt(3)))


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("handoff", [False, True])
def test_an_abort_in_any_state_frees_everything_and_is_told_once(num_steps: int, handoff: bool) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    sequence = make_sequence("r", prompt(20), handoff=handoff, max_tokens=10)
    engine.add(sequence)
    for _ in range(num_steps):
        engine.step()
    assert engine.abort(sequence.key)
    assert not engine.abort(sequence.key)
    outputs = engine.step()
    assert [(o.sequence, o.token_ids, o.finish_reason) for o in outputs] == [(sequence, (), "abort")]
    assert engine.load().num_free_blocks == 64
    assert engine.step() == []


def test_an_abort_of_an_unknown_sequence_is_no_news() -> None:
    engine = make_engine()
    assert not engine.abort(SequenceKey("nobody", 0))
    assert engine.step() == []


class Interrupted(ToyModel):
    """Calls back in the middle of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt: Callable[[], None] = lambda: None

    def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: list[Tensor]) -> Tensor:
        hidden = super().forward(token_ids, batch, caches)
        self.interrupt()
        return hidden


def test_an_abort_during_a_step_keeps_the_blocks_until_the_step_is_over() -> None:
    model = Interrupted()
    engine = make_engine(model)
    doomed, other = make_sequence("doomed", prompt(9)), make_sequence("other", prompt(9, seed=2))
    engine.add(doomed)
    engine.add(other)
    engine.step()
    num_free = engine.load().num_free_blocks
    seen = []

    def abort() -> None:
        if engine.abort(doomed.key):
            seen.append(engine.load().num_free_blocks)

    model.interrupt = abort
    outputs = engine.step()
    assert seen == [num_free]
    assert [(o.sequence, o.finish_reason) for o in outputs if not o.token_ids] == [(doomed, "abort")]
    assert engine.load().num_free_blocks > num_free
    run(engine)
    assert output_of(other) == generate(prompt(9, seed=2))


@pytest.mark.parametrize("seed", range(8))
def test_aborts_at_random_moments_disturb_nobody_else(seed: int) -> None:
    chance = random.Random(seed)
    model = Interrupted()
    engine = make_engine(model, num_blocks=20)
    prompts = [prompt(chance.randint(1, 30), seed=index) for index in range(8)]
    sequences = [make_sequence(f"r{i}", p, handoff=chance.random() < 0.3) for i, p in enumerate(prompts)]
    aborted: set[Sequence] = set()

    def maybe_abort() -> None:
        victim = chance.choice(sequences)
        if chance.random() < 0.2 and engine.abort(victim.key):
            aborted.add(victim)

    model.interrupt = maybe_abort
    for sequence in sequences:
        engine.add(sequence)
    outputs: list[StepOutput] = []
    for _ in range(500):
        outputs += engine.step()
        for sequence in sequences:
            engine.release(sequence.key)  # a decode worker takes it at once
    for sequence, token_ids in zip(sequences, prompts, strict=True):
        ends = [o.finish_reason for o in outputs if o.sequence is sequence and o.finish_reason]
        if sequence in aborted:
            assert ends == ["abort"]
        else:
            assert ends == ([] if sequence.handoff else ["length"])
            assert output_of(sequence) == generate(token_ids)[: 1 if sequence.handoff else 8]
    assert engine.load().num_free_blocks == 20


# Failures


def test_a_failed_step_ends_its_own_sequences_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    model = Interrupted()
    engine = make_engine(model)
    victims = [make_sequence(f"r{i}", prompt(5, seed=i)) for i in range(3)]
    for sequence in victims:
        engine.add(sequence)

    def fail() -> None:
        raise RuntimeError("out of ideas")

    model.interrupt = fail
    outputs = engine.step()
    assert {o.sequence for o in outputs} == set(victims)
    assert all(o.error is not None and o.error.code == "internal" for o in outputs)
    assert "out of ideas" in caplog.text
    assert engine.load().num_free_blocks == 64
    model.interrupt = lambda: None
    assert run_together(engine, PROMPTS) == [generate(token_ids) for token_ids in PROMPTS]


def test_output_that_is_not_finite_ends_only_its_own_sequence() -> None:
    class Poisoned(ToyModel):
        def logits(self, hidden: Tensor) -> Tensor:
            logits = super().logits(hidden)
            logits[0, 3] = float("nan")
            return logits

    engine = make_engine(Poisoned())
    engine.add(make_sequence("a", prompt(5)))
    engine.add(make_sequence("b", prompt(5, seed=1)))
    outputs = engine.step()
    errors = {o.sequence.key.request_id: o.error for o in outputs}
    assert errors["a"] is None or errors["b"] is None
    (error,) = [e for e in errors.values() if e is not None]
    assert (error.code, error.message) == ("internal", "the model's output is not finite")


# Deadlines


@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.parametrize("handoff", [False, True])
def test_a_deadline_ends_a_sequence_in_any_state(num_steps: int, handoff: bool) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    sequence = make_sequence("r", prompt(20), handoff=handoff, max_tokens=50)
    engine.add(sequence)
    for _ in range(num_steps):
        engine.step()
    sequence.deadline = time.monotonic()
    engine.add(make_sequence("late", prompt(3), deadline=time.monotonic()))  # makes the roster look
    outputs = engine.step()
    assert {o.sequence.key.request_id: o.error and o.error.code for o in outputs} == {
        "r": "deadline",
        "late": "deadline",
    }
    assert engine.load().num_free_blocks == 64


class Recorder:
    """Collects what a running engine tells."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self._arrived = threading.Condition()

    def __call__(self, outputs: list[StepOutput]) -> None:
        with self._arrived:
            self.outputs += outputs
            self._arrived.notify_all()

    def wait_for_ends(self, count: int) -> list[StepOutput]:
        return self._wait_for(count, lambda output: output.finish_reason is not None)

    def wait_for_tokens(self, count: int) -> list[StepOutput]:
        return self._wait_for(count, lambda output: bool(output.token_ids))

    def _wait_for(self, count: int, wanted: Callable[[StepOutput], bool]) -> list[StepOutput]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: sum(map(wanted, self.outputs)) >= count, PATIENCE_S)
            return list(filter(wanted, self.outputs))


def test_the_thread_serves_sequences_as_they_come() -> None:
    engine, recorder = make_engine(), Recorder()
    engine.start(recorder)
    try:
        sequences = [make_sequence(f"r{i}", token_ids) for i, token_ids in enumerate(PROMPTS)]
        for sequence in sequences:
            engine.add(sequence)
        recorder.wait_for_ends(len(sequences))
        assert [output_of(s) for s in sequences] == [generate(token_ids) for token_ids in PROMPTS]
        assert engine.alive
    finally:
        assert engine.stop()
    assert not engine.alive


def test_many_threads_may_speak_to_the_engine_at_once() -> None:
    engine, recorder = make_engine(num_blocks=40), Recorder()
    engine.start(recorder)
    aborted: set[SequenceKey] = set()

    def talk(name: int) -> None:
        chance = random.Random(name)
        for index in range(10):
            key = SequenceKey(f"{name}.{index}", 0)
            engine.add(make_sequence(key.request_id, PROMPTS[index % len(PROMPTS)]))
            reservation = engine.reserve(9, (b"a" * 16, bytes([name]) * 16))
            engine.load()
            if chance.random() < 0.3 and engine.abort(key):
                aborted.add(key)
            if reservation is not None:
                engine.cancel(reservation)

    threads = [threading.Thread(target=talk, args=(name,)) for name in range(4)]
    try:
        for thread in threads:
            thread.start()
        ends = recorder.wait_for_ends(40)
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)
        engine.stop()
    assert {end.sequence.key for end in ends if end.finish_reason == "abort"} == aborted
    for end in ends:
        if end.finish_reason != "abort":
            sequence = end.sequence
            assert output_of(sequence) == generate(sequence.token_ids[: sequence.num_prompt_tokens])
    assert engine.load().num_free_blocks == 40


def test_a_deadline_fires_while_the_engine_has_nothing_to_do() -> None:
    engine, recorder = make_engine(), Recorder()
    engine.start(recorder)
    try:
        engine.add(make_sequence("r", prompt(5), handoff=True, deadline=time.monotonic() + 2))
        (end,) = recorder.wait_for_ends(1)
        assert end.error is not None
        assert end.error.code == "deadline"
        assert end.sequence.num_output_tokens == 1
        assert engine.load().num_free_blocks == 64
    finally:
        engine.stop()


def test_a_deadline_fires_while_sequences_wait_for_blocks_that_do_not_come() -> None:
    engine, recorder = make_engine(num_blocks=8), Recorder()
    engine.start(recorder)
    try:
        reservation = engine.reserve(20, tuple(bytes([i]) * 16 for i in range(5)))
        assert reservation is not None
        engine.add(make_sequence("r", prompt(20), deadline=time.monotonic() + 0.2))
        (end,) = recorder.wait_for_ends(1)
        assert end.error is not None
        assert end.error.code == "deadline"
        engine.add(make_sequence("r", prompt(20)))
        engine.cancel(reservation)  # wakes the thread
        assert recorder.wait_for_ends(2)[1].finish_reason == "length"
    finally:
        engine.stop()


def test_stopping_ends_every_sequence_with_an_error() -> None:
    engine, recorder = make_engine(num_blocks=16), Recorder()
    engine.start(recorder)
    parked = make_sequence("parked", prompt(30), handoff=True)
    engine.add(parked)
    waiting = make_sequence("waiting", prompt(60))
    engine.add(waiting)
    assert engine.stop()
    ends = recorder.wait_for_ends(2)
    assert {end.sequence for end in ends} == {parked, waiting}
    assert {end.error.code for end in ends if end.error} == {"draining"}
    with pytest.raises(Refusal) as refusal:
        engine.add(make_sequence("late", prompt(3)))
    assert refusal.value.error.code == "draining"
    assert engine.load().num_free_blocks == 16


def test_stopping_does_not_wait_for_a_step_that_hangs() -> None:
    model, release, entered = Interrupted(), threading.Event(), threading.Event()
    engine, recorder = make_engine(model), Recorder()

    def hang() -> None:
        entered.set()
        release.wait(PATIENCE_S)

    model.interrupt = hang
    engine.start(recorder)
    engine.add(make_sequence("r", prompt(3)))
    assert entered.wait(PATIENCE_S)
    try:
        assert not engine.stop(timeout_s=0.1)
        assert len(recorder.wait_for_ends(1)) == 1
    finally:
        release.set()
    assert engine.stop(timeout_s=PATIENCE_S)
    assert len(recorder.wait_for_ends(1)) == 1


def test_an_engine_whose_books_do_not_add_up_ends_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine, recorder = make_engine(), Recorder()
    engine.start(recorder)
    engine.add(make_sequence("r", prompt(3), handoff=True))
    recorder.wait_for_tokens(1)
    lost = engine.reserve(4, (b"h" * 16,))
    assert lost is not None
    with caplog.at_level(logging.CRITICAL):
        lost.block_ids.append(63)  # a block that nobody gave out
        engine.add(make_sequence("s", prompt(3)))
        ends = recorder.wait_for_ends(2)
    assert {end.error.code for end in ends if end.error} == {"internal"}
    assert not engine.alive
    with pytest.raises(Refusal):
        engine.add(make_sequence("t", prompt(3)))


def test_a_listener_that_fails_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine, recorder = make_engine(), Recorder()
    failures = iter([True])

    def fragile(outputs: list[StepOutput]) -> None:
        if next(failures, False):
            raise RuntimeError("not now")
        recorder(outputs)

    engine.start(fragile)
    try:
        engine.add(make_sequence("r", prompt(3)))
        assert recorder.wait_for_ends(1)[0].finish_reason == "length"
        assert "not now" in caplog.text
    finally:
        engine.stop()


# Figures


def test_every_new_token_comes_with_its_logprobs_when_asked_for() -> None:
    engine = make_engine()
    sequence = make_sequence("r", prompt(5), handoff=True, num_logprobs=3)
    engine.add(sequence)
    engine.add(make_sequence("s", prompt(5), num_logprobs=0))
    outputs = run(engine)
    firsts = [o for o in outputs if o.sequence is sequence and o.token_ids]
    assert len(firsts[0].logprobs) == 1
    assert len(firsts[0].logprobs[0].top) == 3
    others = [o for o in outputs if o.sequence is not sequence]
    assert len(others) == 8
    assert all(o.logprobs[0].token_id == o.token_ids[0] and o.logprobs[0].top == () for o in others)


def test_timings_tell_where_the_time_went() -> None:
    source, target = make_engine(), make_engine()
    sequence = make_sequence("r", prompt(9), handoff=True)
    successor = hand_over(source, target, sequence)
    run(target)
    there, here = timings_of(sequence), timings_of(successor)
    assert there.keys() >= {"queue_s", "prefill_s", "prefill_kernel_s", "prefill_cache_s"}
    assert here.keys() == {
        "decode_wait_s", "first_step_s", "decode_s", "decode_kernel_s", "decode_cache_s",
    }  # fmt: skip
    assert all(seconds >= 0 for seconds in here.values())
    assert 0 < there["prefill_kernel_s"] <= there["prefill_s"]
    assert 0 < here["decode_kernel_s"] <= here["first_step_s"] + here["decode_s"]


def test_steps_are_counted_by_what_they_compute() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_sequence("r", prompt(12), max_tokens=3))
    run(engine)
    seen = engine.histograms()
    assert sum(seen["prefill_step_seconds"].counts) == 2
    assert sum(seen["decode_step_seconds"].counts) == 2
    assert seen["step_tokens"].total == 14 and seen["step_sequences"].total == 4


def test_counts_tokens_and_reports_load() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_sequence("r", prompt(20), max_tokens=3))
    engine.add(make_sequence("s", prompt(2, seed=1), max_tokens=3))
    load = engine.load()
    assert (load.num_waiting, load.num_running, load.num_queued_tokens) == (2, 0, 22)
    engine.step()
    load = engine.load()
    assert (load.num_waiting, load.num_running, load.num_queued_tokens) == (0, 2, 15)
    run(engine)
    engine.add(make_sequence("again", prompt(20), max_tokens=3))
    run(engine)
    counters = engine.counters()
    assert counters["prompt_tokens_total"] == 42
    assert counters["cached_tokens_total"] == 16
    assert counters["generation_tokens_total"] == 9


def test_tells_which_blocks_are_known() -> None:
    engine = make_engine(num_blocks=8)
    engine.add(make_sequence("r", prompt(9), max_tokens=1))
    run(engine)
    events, known = engine.cached_hashes()
    assert len(events.stored) == 2
    assert events.removed == ()
    assert set(known) == set(events.stored)
    assert engine.take_events() == ((), ())
    engine.add(make_sequence("s", prompt(31, seed=1), max_tokens=1))
    run(engine)
    assert set(engine.take_events().removed) == set(events.stored)


def test_a_cache_salt_keeps_blocks_apart() -> None:
    engine = make_engine()
    for salt, num_cached in (("a", 0), ("b", 0), ("a", 8)):
        sequence = make_sequence("r", prompt(9), cache_salt=salt)
        engine.add(sequence)
        run(engine)
        assert sequence.num_cached_tokens == num_cached


def test_fills_a_step_with_no_more_tokens_than_allowed() -> None:
    model = ToyModel()
    engine = make_engine(model, max_num_batched_tokens=16)
    run_together(engine, PROMPTS)
    assert model.max_rows == 16


def test_computes_a_shared_prefix_once_even_for_prompts_that_come_together() -> None:
    model = ToyModel()
    engine = make_engine(model)
    shared = prompt(40)
    prompts = [shared + prompt(5, seed) for seed in range(6)]
    assert run_together(engine, prompts, max_tokens=1) == [generate(p, max_tokens=1) for p in prompts]
    assert model.num_rows == 40 + 6 * 5


def test_serves_the_longest_sequence_of_the_model() -> None:
    engine = make_engine()
    sequence = make_sequence("r", prompt(MAX_MODEL_LEN - 3), max_tokens=100)
    engine.add(sequence)
    assert run(engine)[-1].finish_reason == "length"
    assert output_of(sequence) == generate(prompt(MAX_MODEL_LEN - 3), max_tokens=3)
