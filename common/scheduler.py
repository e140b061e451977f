"""Which tokens the next step computes, and what came of it. No tensors.

There are no phases. A sequence has tokens, some of them computed; each step closes part of the gap, within
a budget of tokens, and where it closes all of it the next token is sampled.

1. Running sequences that lack a single token come first: no prompt delays a running stream.
2. The rest of the budget goes to sequences that lack more, waiting ones included: in order of fewest tokens
   left, so that a short prompt does not wait for long ones; but the most important one is sure of half of
   it, so that a long prompt finishes however many short ones come. Prompts of one length come in order of
   arrival.

The most important waiting sequence is started before any other, so that nothing overtakes it on its way to
blocks.
"""

import math
import time
from bisect import insort
from dataclasses import dataclass
from typing import NamedTuple

from common import timings
from common.messages import TokenLogprob, WorkerError
from common.roster import Roster, importance
from common.sequence import Sequence, State, StepOutput


class Work(NamedTuple):
    """Compute ``num_tokens`` tokens of a sequence from index ``start`` on; sample the next one if these are
    the last."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def num_outputs(self) -> int:
        """Rows whose hidden states are wanted, the last ones."""
        return self.num_tokens if self.sequence.wants_prompt_logprobs else int(self.samples)


class Sampled(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of started sequences
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_generation_tokens: int = 0


class Scheduler:
    """A step computes ``step_tokens`` at most, or ``lone_step_tokens`` where one sequence is all there is:
    weights are read once a step, and nobody else waits for its end. ``max_parked_blocks`` bounds what waits
    for decode workers: beyond it no sequence to be handed over is started, except when none is parked."""

    def __init__(
        self, roster: Roster, step_tokens: int, lone_step_tokens: int, max_parked_blocks: int
    ) -> None:
        self.counters = Counters()
        self._roster = roster
        self._step_tokens = step_tokens
        self._lone_step_tokens = lone_step_tokens
        self._max_parked_blocks = max_parked_blocks
        self._computing: dict[bytes, int] = {}  # hashes of blocks being computed -> best priority
        self._started: list[StepOutput] = []  # sequences to be handed over that hold their blocks now

    def plan(self, now: float) -> list[Work]:
        """The work of the next step, empty when there is none. ``record`` or ``fail`` must follow; until
        then the blocks are kept from reuse."""
        self._roster.expire(now)
        works = self._plan_single_tokens()
        budget = self._lone_step_tokens if self._roster.is_alone() else self._step_tokens
        works += self._plan_prompts(budget - len(works))
        for work in works:
            self._roster.lend(work.sequence)
            work.sequence.marks.setdefault(timings.SCHEDULED, now)
        return works

    def record(self, works: list[Work], sampled: list[Sampled | WorkerError]) -> list[StepOutput]:
        """Take in the results of a step: one of ``sampled`` for every work that samples, an error where no
        token could be. Returns what happened to each sequence, ends outside steps included."""
        self.counters.num_steps += bool(works)
        results = iter(sampled)
        outputs = []
        for work in works:
            result = next(results) if work.samples else None
            self._roster.take_back(work.sequence)
            if work.sequence.state is not State.FINISHED:
                outputs += self._advance(work, result)
        return outputs + self.take_ended()

    def fail(self, works: list[Work], error: WorkerError) -> list[StepOutput]:
        """The step broke down: end its sequences."""
        for sequence in (work.sequence for work in works):
            self._roster.take_back(sequence)
            if sequence.state is not State.FINISHED:
                self._roster.end(sequence, "error", error)
        return self.take_ended()

    def take_started(self) -> list[StepOutput]:
        """Sequences to be handed over that were started by the last plan."""
        started, self._started = self._started, []
        return started

    def take_ended(self) -> list[StepOutput]:
        """Ends that were not returned yet."""
        ended, self._roster.ended = self._roster.ended, []
        return ended

    def _plan_single_tokens(self) -> list[Work]:
        works = []
        for sequence in list(self._roster.running):
            preempted = sequence.state is not State.RUNNING
            if not preempted and sequence.num_to_compute == 1 and self._roster.grow(sequence):
                works.append(_work(sequence, 1))
        return works

    def _plan_prompts(self, budget: int) -> list[Work]:
        prompts = [s for s in self._roster.running if s.num_to_compute > 1]
        self._computing = {}
        for sequence in prompts:
            self._note_computing(sequence)
        head = self._start_head()
        if head is not None:
            insort(prompts, head, key=importance)
        if not prompts:
            return []
        first, *others = prompts
        if head is not None:
            others += self._roster.waiting
        sure = min(first.num_to_compute, max(1, budget // 2))
        others.sort(key=_shortness)
        shorter = [s for s in others if _shortness(s) < _shortness(first)]
        works = self._share(shorter, budget - sure)
        works += self._share([first], budget - _total(works))
        return works + self._share(others[len(shorter) :], budget - _total(works))

    def _share(self, sequences: list[Sequence], budget: int) -> list[Work]:
        """Give each what it lacks, in this order, while the budget lasts; those that wait must be able to
        start."""
        works = []
        for sequence in sequences:
            if budget == 0:
                break
            if sequence.state is State.WAITING and (self._must_wait(sequence) or not self._start(sequence)):
                continue
            works.append(_work(sequence, min(sequence.num_to_compute, budget)))
            budget -= works[-1].num_tokens
        return works

    def _start_head(self) -> Sequence | None:
        """Start the most important waiting sequence that nothing but room could keep from it."""
        self._roster.starved = False
        if not self._roster.has_slot():
            return None
        head = next((s for s in self._roster.waiting if not self._must_wait(s)), None)
        if head is None:
            return None
        self._roster.starved = not self._start(head)
        return None if self._roster.starved else head

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether it has a reason other than room: decode workers are behind with taking parked blocks, or
        the next block of its prefix is just being computed for another sequence and can be shared soon."""
        roster = self._roster
        if sequence.handoff and roster.parked:
            num_parked = roster.num_parked_blocks() + roster.prompt_blocks(sequence)
            if num_parked > self._max_parked_blocks:
                return True
        if not self._computing:
            return False
        num_found = len(roster.find(sequence))
        missing = sequence.block_hashes[num_found : roster.num_shareable(sequence)]
        return bool(missing) and self._computing.get(missing[0], math.inf) <= sequence.priority

    def _start(self, sequence: Sequence) -> bool:
        if not self._roster.start(sequence):
            return False
        self._note_computing(sequence)
        if sequence.handoff:
            self._started.append(StepOutput(sequence))
        if timings.SCHEDULED not in sequence.marks:  # not after a preemption
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_tokens += sequence.num_cached_tokens
        return True

    def _note_computing(self, sequence: Sequence) -> None:
        if not self._roster.shares_blocks:
            return
        for block_hash in sequence.block_hashes[sequence.num_committed :]:
            known = self._computing.get(block_hash, sequence.priority)
            self._computing[block_hash] = min(known, sequence.priority)

    def _advance(self, work: Work, result: Sampled | WorkerError | None) -> list[StepOutput]:
        sequence = work.sequence
        sequence.num_computed += work.num_tokens
        self._roster.commit(sequence)
        if isinstance(result, Sampled):
            return [self._append(sequence, result)]
        if result is not None:
            self._roster.end(sequence, "error", result)
        # A sender passes on what is computed so far; nobody else needs to know.
        return [StepOutput(sequence)] if sequence.handoff and not work.samples else []

    def _append(self, sequence: Sequence, result: Sampled) -> StepOutput:
        sequence.token_ids.append(result.token_id)
        sequence.marks.setdefault(timings.FIRST_TOKEN, time.monotonic())
        self.counters.num_generation_tokens += 1
        reason = self._roster.finish_reason(sequence)
        if reason is not None:
            self._roster.close(sequence)
        elif sequence.handoff:
            self._roster.park(sequence)
        logprobs = () if result.logprob is None else (result.logprob,)
        return StepOutput(sequence, (result.token_id,), logprobs, reason)


def _work(sequence: Sequence, count: int) -> Work:
    return Work(sequence, sequence.num_computed, count, count == sequence.num_to_compute)


def _total(works: list[Work]) -> int:
    return sum(work.num_tokens for work in works)


def _shortness(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.priority, sequence.num_to_compute, sequence.arrival
