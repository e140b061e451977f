import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.hashing import block_hashes
from common.messages import Refusal, WorkerError
from common.pool import BlockPool
from common.roster import Reservation, Roster
from common.scheduler import Sampled, Scheduler, Work
from common.sequence import Sequence, State, StepOutput
from tests.common.toy import make_config, make_sequence

BLOCK_SIZE = 4
EOS = 96


class Books:
    """A scheduler with what belongs to it, and with a record of the tokens that each place in the cache was
    computed from in place of a model: what a step reads must be what its sequence put there."""

    def __init__(
        self, max_parked_blocks: int | None = None, max_model_len: int = 1000, **changes: Any
    ) -> None:
        config = make_config(block_size=BLOCK_SIZE, **changes)
        self.pool = BlockPool(config.num_blocks, config.enable_prefix_caching)
        self.roster = Roster(config, self.pool, "m", max_model_len, [EOS])
        parked = config.num_blocks if max_parked_blocks is None else max_parked_blocks
        self.scheduler = Scheduler(self.roster, config.step_tokens, config.lone_step_tokens, parked)
        self.budget = config.lone_step_tokens
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.names = map(str, range(10**9))

    def add(self, length: int = 6, stem: int = 0, **changes: Any) -> Sequence:
        """Prompts of one ``stem`` begin alike."""
        tokens = random.Random(stem).choices(range(90), k=length)
        sequence = make_sequence(next(self.names), tokens, **changes)
        self.roster.hash(sequence)
        self.roster.add(sequence)
        return sequence

    def plan(self, now: float = 0.0) -> list[Work]:
        works = self.scheduler.plan(now)
        assert sum(work.num_tokens for work in works) <= self.budget
        assert len({work.sequence for work in works}) == len(works)
        for work in works:
            assert work.num_tokens > 0
            assert work.start == work.sequence.num_computed
            self.compute(work.sequence, work.start, work.num_tokens)
        return works

    def compute(self, sequence: Sequence, start: int, count: int) -> None:
        tokens = tuple(sequence.token_ids)
        for position in range(start + count):
            block, offset = divmod(position, BLOCK_SIZE)
            place = (sequence.block_ids[block], offset)
            if position >= start:
                self.content[place] = tokens[: position + 1]
            assert self.content[place] == tokens[: position + 1], "reads what is not its own"

    def record(self, works: list[Work]) -> list[StepOutput]:
        sampled = [Sampled(sum(work.sequence.token_ids) % 90) for work in works if work.samples]
        outputs = self.scheduler.record(works, list(sampled))
        self.roster.check()
        return outputs

    def step(self) -> dict[Sequence, int]:
        """How many tokens of which sequence the step computed."""
        works = self.plan()
        self.record(works)
        return {work.sequence: work.num_tokens for work in works}

    def steps(self) -> Iterator[dict[Sequence, int]]:
        """Until nothing is left to do."""
        for _ in range(10_000):
            if not (done := self.step()):
                return
            yield done
        raise AssertionError("there is no end of it")


# Who goes first


def test_single_tokens_go_before_prompts() -> None:
    books = Books(max_num_batched_tokens=8)
    streams = [books.add(4, stem, max_tokens=20) for stem in range(2)]
    books.step()
    books.add(100, stem=9, priority=-1)
    for _ in range(5):
        done = books.step()
        assert [done[stream] for stream in streams] == [1, 1]
        assert sum(done.values()) == 8


def test_one_prompt_alone_gets_the_whole_budget() -> None:
    books = Books(max_num_batched_tokens=16)
    sequence = books.add(40)
    assert [done[sequence] for done in (books.step(), books.step(), books.step())] == [16, 16, 8]


def test_steps_are_longer_while_one_sequence_is_all_there_is() -> None:
    books = Books(max_num_batched_tokens=0, num_blocks=2048, max_model_len=8000)
    sequence = books.add(5000)
    assert books.step()[sequence] == 1024
    books.add(8, stem=1, max_tokens=1)
    assert sum(books.step().values()) == 512
    assert books.step()[sequence] == 1024
    reservation = books.roster.reserve(3, ())  # a stream is on its way to here
    assert reservation is not None
    assert books.step()[sequence] == 512
    books.roster.cancel(reservation)
    assert books.step()[sequence] == 1024


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    books = Books(max_num_batched_tokens=16)
    long = [books.add(100, stem) for stem in range(2)]
    books.step()
    short = books.add(6, stem=5)
    done = books.step()
    assert done == {short: 6, long[0]: 10}


def test_prompts_of_one_length_come_in_order_of_arrival() -> None:
    books = Books(max_num_batched_tokens=16)
    prompts = [books.add(40, stem, max_tokens=1) for stem in range(3)]
    order = [sequence for done in books.steps() for sequence in done if sequence.state is State.FINISHED]
    assert order == prompts
    assert books.scheduler.counters.num_steps == 8  # no step leaves a part of the budget unused


def test_a_long_prompt_finishes_however_many_short_ones_come() -> None:
    books = Books(max_num_batched_tokens=16)
    long = books.add(80)
    num_steps = 0
    while long.num_output_tokens == 0:
        for stem in range(3):
            books.add(6, stem=1000 * num_steps + stem, max_tokens=1)
        books.step()
        num_steps += 1
    assert num_steps <= 80 / (16 / 2)


def test_lower_priority_numbers_start_first_and_come_first() -> None:
    books = Books(max_num_batched_tokens=8, max_num_seqs=2)
    books.add(20, 1, priority=1)
    urgent = [books.add(20, 2, priority=0), books.add(20, 3, priority=0)]
    order = [sequence for done in books.steps() for sequence in done if sequence.num_output_tokens == 1]
    assert set(order[:2]) == set(urgent)


def test_nothing_overtakes_the_first_in_the_queue_on_its_way_to_blocks() -> None:
    books = Books(num_blocks=10)
    books.add(16, max_tokens=8)
    books.step()
    large, small = books.add(30, stem=1), books.add(4, stem=2)
    finished = []
    for _ in books.steps():
        assert not (small.state is State.RUNNING and large.state is State.WAITING)
        finished += [s for s in (large, small) if s.state is State.FINISHED and s not in finished]
    assert set(finished) == {large, small}


def test_a_prompt_waits_for_its_prefix_being_computed_unless_it_is_more_urgent() -> None:
    books = Books(max_num_batched_tokens=16)
    first, second = books.add(40), books.add(40)
    urgent = books.add(40, priority=-1)
    done = books.step()
    assert second.state is State.WAITING
    assert done[urgent] >= 8
    assert first not in done  # the urgent one computes its prefix
    for _ in books.steps():
        pass
    assert (second.num_cached_tokens, first.num_cached_tokens, urgent.num_cached_tokens) == (36, 36, 0)


def test_nobody_waits_for_a_prefix_when_caching_is_off() -> None:
    books = Books(max_num_batched_tokens=32, enable_prefix_caching=False)
    first, second = books.add(8), books.add(8)
    assert books.step() == {first: 8, second: 8}


# Room


def test_the_least_important_running_sequence_loses_its_blocks() -> None:
    books = Books(num_blocks=7)
    old, young = books.add(8, 1, max_tokens=20), books.add(8, 2, max_tokens=20)
    urgent = books.add(4, 3, max_tokens=4, priority=-1)
    preempted = []
    for _ in books.steps():
        preempted += [s for s in (urgent, old, young) if s.state is State.WAITING and s not in preempted]
    assert preempted[0] is young
    assert urgent not in preempted
    assert all(s.num_output_tokens == s.sampling.max_tokens for s in (urgent, old, young))


def test_a_sequence_to_be_handed_over_never_loses_its_blocks() -> None:
    books = Books(num_blocks=10, max_num_batched_tokens=2)
    local = books.add(6, 1, max_tokens=30)
    books.step()
    books.step()
    books.step()
    handoff = books.add(24, 2, handoff=True)
    books.step()
    for _ in books.steps():
        assert handoff not in books.roster.waiting
    assert handoff.key in books.roster.parked
    assert local in books.roster.waiting  # until the blocks are taken
    assert books.roster.release(handoff.key)
    for _ in books.steps():
        pass
    assert local.num_output_tokens == 30


def test_parked_blocks_are_bounded_but_one_prompt_always_fits() -> None:
    books = Books(num_blocks=30, max_parked_blocks=4)
    large = books.add(40, 1, handoff=True)
    for _ in books.steps():
        pass
    assert large.state is State.PARKED
    blocked, local = books.add(4, 2, handoff=True), books.add(4, 3)
    for _ in books.steps():
        pass
    assert blocked in books.roster.waiting
    assert local.num_output_tokens == 8
    books.roster.release(large.key)
    for _ in books.steps():
        pass
    assert blocked.state is State.PARKED
    assert books.roster.load().num_parked_blocks == 1


def test_a_prompt_to_be_handed_over_is_told_of_when_it_starts_and_once() -> None:
    """Told of earlier, it would take a place elsewhere that those need which keep it waiting here."""
    books = Books(max_parked_blocks=2, num_blocks=8)
    first = books.add(5, 1, handoff=True)
    books.step()
    assert [output.sequence for output in books.scheduler.take_started()] == [first]
    second = books.add(5, 2, handoff=True)
    books.step()
    assert not books.scheduler.take_started()
    books.roster.release(first.key)
    books.plan()
    assert [output.sequence for output in books.scheduler.take_started()] == [second]


def test_a_reservation_takes_a_slot_and_waits_behind_a_starved_sequence() -> None:
    books = Books(num_blocks=8, max_num_seqs=2)
    running = books.add(16, 1, max_tokens=2)
    books.step()
    books.add(20, 2, max_tokens=1)
    books.step()
    assert running.state is State.FINISHED
    reservation = books.roster.reserve(4, (b"h" * 16,))
    assert reservation is None  # the second sequence was first in line
    for _ in books.steps():
        pass
    first, second = books.roster.reserve(4, (b"h" * 16,)), books.roster.reserve(4, (b"h" * 16,))
    assert first is not None
    assert second is not None
    assert books.roster.reserve(1, ()) is None
    assert books.roster.load().num_receiving == 2
    waiting = books.add(4, 3)
    books.step()
    assert waiting in books.roster.waiting
    books.roster.cancel(first)
    books.step()
    assert waiting in books.roster.running


def test_every_running_sequence_gets_a_token_even_with_a_tiny_budget() -> None:
    books = Books(max_num_batched_tokens=3, max_num_seqs=8)
    sequences = [books.add(5, stem) for stem in range(6)]
    for _ in books.steps():
        assert len(books.roster.running) <= 3
    assert all(s.num_output_tokens == 8 for s in sequences)


# Any order of events


class Workload(RuleBasedStateMachine):
    """Sequences come, are aborted, handed over and adopted at any moment, also in the middle of a step."""

    @initialize(
        num_blocks=st.integers(4, 24),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        max_parked_blocks=st.integers(1, 24),
        caching=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_parked_blocks: int,
        caching: bool,
    ) -> None:
        self.books = Books(
            max_parked_blocks,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=caching,
        )
        self.works: list[Work] | None = None
        self.now = 0.0
        self.sequences: list[Sequence] = []
        self.reservations: list[tuple[Reservation, list[int]]] = []
        self.lent: list[tuple[Sequence, list[int]]] = []
        self.outputs: list[StepOutput] = []

    @rule(
        length=st.integers(1, 60),
        stem=st.integers(0, 2),
        max_tokens=st.integers(1, 20),
        handoff=st.booleans(),
        priority=st.integers(0, 1),
        time_left=st.one_of(st.just(math.inf), st.floats(0, 20)),
    )
    def add(
        self, length: int, stem: int, max_tokens: int, handoff: bool, priority: int, time_left: float
    ) -> None:
        changes: dict[str, Any] = {"max_tokens": max_tokens, "handoff": handoff, "priority": priority}
        num_tokens = length if handoff else length + 1
        if num_tokens > self.books.pool.num_blocks * BLOCK_SIZE:
            with pytest.raises(Refusal, match="the KV cache has"):
                self.books.add(length, stem, **changes)
            return
        self.sequences.append(self.books.add(length, stem, deadline=self.now + time_left, **changes))

    @rule(passed=st.floats(0, 3))
    @precondition(lambda self: self.works is None)
    def plan(self, passed: float) -> None:
        self.now += passed
        self.works = self.books.plan(self.now)

    @rule(fails=st.integers(0, 9))
    @precondition(lambda self: self.works is not None)
    def finish_step(self, fails: int) -> None:
        assert self.works is not None
        if fails == 0:
            error = WorkerError("internal", "broken")
            self.outputs += self.books.scheduler.fail(self.works, error)
        else:
            self.outputs += self.books.record(self.works)
        self.works = None

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.sequences:
            sequence = data.draw(st.sampled_from(self.sequences))
            was_live = sequence.state is not State.FINISHED
            assert self.books.roster.abort(sequence.key) == was_live

    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        sequences = [s for s in self.sequences if s.handoff]
        if sequences:
            sequence = data.draw(st.sampled_from(sequences))
            if self.books.roster.lend(sequence):
                self.lent.append((sequence, sequence.block_ids[: sequence.num_computed // BLOCK_SIZE]))

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        if self.lent:
            sequence, block_ids = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
            for index, block_id in enumerate(block_ids):
                tokens = tuple(sequence.token_ids[: (index + 1) * BLOCK_SIZE])
                assert self.books.content[block_id, BLOCK_SIZE - 1] == tokens
            self.books.roster.take_back(sequence)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        parked = [s for s in self.sequences if s.state is State.PARKED]
        if parked:
            assert self.books.roster.release(data.draw(st.sampled_from(parked)).key)

    @rule(length=st.integers(1, 40), stem=st.integers(0, 2))
    def reserve(self, length: int, stem: int) -> None:
        token_ids = random.Random(stem).choices(range(90), k=length)
        hashes = tuple(block_hashes("m", "", token_ids, BLOCK_SIZE))
        if length + 1 > self.books.roster.max_sequence_tokens:
            with pytest.raises(Refusal, match="do not fit"):
                self.books.roster.reserve(length, hashes)
            return
        reservation = self.books.roster.reserve(length, hashes)
        if reservation is not None:
            self.reservations.append((reservation, token_ids))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.reservations:
            index = data.draw(st.integers(0, len(self.reservations) - 1))
            self.books.roster.cancel(self.reservations.pop(index)[0])

    @rule(data=st.data(), max_tokens=st.integers(2, 20))
    def adopt(self, data: st.DataObject, max_tokens: int) -> None:
        if self.reservations:
            index = data.draw(st.integers(0, len(self.reservations) - 1))
            reservation, token_ids = self.reservations.pop(index)
            self.land(reservation, token_ids)
            sequence = make_sequence(
                next(self.books.names),
                [*token_ids, 7],
                num_prompt_tokens=len(token_ids),
                max_tokens=max_tokens,
            )
            self.books.roster.hash(sequence)
            self.books.roster.adopt(reservation, sequence)
            self.sequences.append(sequence)

    def land(self, reservation: Reservation, token_ids: list[int]) -> None:
        for position in range(reservation.num_cached_blocks * BLOCK_SIZE, len(token_ids)):
            block, offset = divmod(position, BLOCK_SIZE)
            self.books.content[reservation.block_ids[block], offset] = tuple(token_ids[: position + 1])

    @invariant()
    def accounts_for_all(self) -> None:
        if hasattr(self, "books"):
            self.books.roster.check()

    def teardown(self) -> None:
        """Once nobody interferes any more, everything ends, once, and every block comes back."""
        if not hasattr(self, "books"):
            return
        if self.works is not None:
            self.finish_step(1)
        for sequence, _ in self.lent:
            self.books.roster.take_back(sequence)
        for reservation, _ in self.reservations:
            self.books.roster.cancel(reservation)
        for _ in range(2000):
            for sequence in self.sequences:
                self.books.roster.release(sequence.key)
            self.outputs += self.books.record(self.books.plan(self.now))
            if not (self.books.roster.waiting or self.books.roster.running or self.books.roster.parked):
                break
        assert all(sequence.state is State.FINISHED for sequence in self.sequences)
        assert self.books.pool.num_free == self.books.pool.num_blocks
        self.count_ends()

    def count_ends(self) -> None:
        self.outputs += self.books.scheduler.take_ended()
        for sequence in self.sequences:
            ends = [o for o in self.outputs if o.sequence is sequence and o.finish_reason is not None]
            assert len(ends) == (0 if "landed" in sequence.marks else 1)


Workload.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWorkload = Workload.TestCase


@pytest.mark.parametrize("num_blocks", [6, 9, 14])
@pytest.mark.parametrize("caching", [False, True])
def test_a_crowd_in_a_small_pool_is_served_to_the_end(num_blocks: int, caching: bool) -> None:
    chance = random.Random(num_blocks)
    books = Books(num_blocks=num_blocks, enable_prefix_caching=caching)
    sequences = [
        books.add(chance.randint(1, 4 * num_blocks - 1), chance.randint(0, 3), max_tokens=30)
        for _ in range(40)
    ]
    for _ in books.steps():
        pass
    for sequence in sequences:
        limit = min(30, 4 * num_blocks - sequence.num_prompt_tokens)
        assert sequence.num_output_tokens == limit
