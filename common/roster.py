"""The sequences of an engine and the blocks each of them holds. No tensors.

Importance is (priority, arrival), lower first. Sequences start by taking blocks for all their known tokens
and one more at once (two half-admitted prompts could wait for each other forever), grow block by block, and
lose their blocks when preempted. The blocks of an ended sequence go back to the pool when its last user, a
running step or a sender, lets go of them.

A sequence ends exactly once; every end is noted in ``ended``, save for what another worker took over
(``release``).
"""

import math
import time
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

from common import timings
from common.config import EngineConfig
from common.hashing import extend_hashes, root_hash
from common.messages import FinishReason, Load, Refusal, WorkerError
from common.pool import BlockPool
from common.sequence import Sequence, SequenceKey, State, StepOutput
from common.stopping import finish_reason


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks held for a sequence whose first ``num_tokens`` tokens are computed elsewhere."""

    num_tokens: int
    block_hashes: tuple[bytes, ...]
    block_ids: list[int]
    num_cached_blocks: int  # leading blocks whose content is here already


def importance(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


class Roster:
    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        model_fingerprint: str,
        max_model_len: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self.max_sequence_tokens = min(max_model_len, pool.num_blocks * config.block_size)
        self.waiting: list[Sequence] = []  # most important first
        self.running: list[Sequence] = []  # most important first
        self.parked: dict[SequenceKey, Sequence] = {}
        self.ended: list[StepOutput] = []
        self.shares_blocks = pool.caching
        self.starved = False  # the first in the queue waits for blocks: nothing is reserved before it
        self.num_preemptions = 0
        self._pool = pool
        self._fingerprint = model_fingerprint
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._block_size = config.block_size
        # Each of them gets a token in every step.
        self._max_running = min(config.max_num_seqs, config.step_tokens)
        self._max_waiting = config.max_waiting_seqs
        self._arrivals = count()
        self._live: dict[SequenceKey, Sequence] = {}
        self._lingering: set[Sequence] = set()  # ended, blocks still in use
        self._reservations: set[Reservation] = set()
        self._next_deadline = math.inf

    # Sequences come

    def add(self, sequence: Sequence) -> None:
        """Queue it. Raises ``Refusal`` when the queue is full or the sequence can never fit."""
        self._refuse_duplicate(sequence)
        self._refuse_oversized(sequence)
        if len(self.waiting) >= self._max_waiting:
            raise Refusal("overloaded", f"{self._max_waiting} sequences wait already")
        self._enter(sequence)
        insort(self.waiting, sequence, key=importance)

    def reserve(self, num_tokens: int, block_hashes: tuple[bytes, ...]) -> Reservation | None:
        """Hold a slot, and blocks for ``num_tokens`` tokens and one more, the leading ones shared where
        their hashes are known. None when there is no room now; ``Refusal`` when there never will be."""
        if num_tokens < 1 or len(block_hashes) != num_tokens // self._block_size:
            raise Refusal("invalid", f"{len(block_hashes)} block hashes for {num_tokens} tokens")
        if num_tokens + 1 > self.max_sequence_tokens:
            limit = f"this worker holds sequences of at most {self.max_sequence_tokens}"
            raise Refusal("invalid", f"{num_tokens} tokens and one more do not fit: {limit}")
        if self.starved or not self.has_slot():
            return None
        shared = self._pool.find(block_hashes)
        block_ids = self._pool.take(self._blocks_for(num_tokens + 1), shared, self._spare())
        if block_ids is None:
            return None
        reservation = Reservation(num_tokens, block_hashes, block_ids, len(shared))
        self._reservations.add(reservation)
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        """Return what was reserved; does nothing once it is cancelled or adopted."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._pool.give_back(reservation.block_ids)

    def adopt(self, reservation: Reservation, sequence: Sequence) -> None:
        """Run a sequence whose first tokens have landed in the reserved blocks. Its ``block_hashes`` must
        be computed from its tokens. Raises ``Refusal``, the reservation untouched, when it is not the one
        that was reserved for."""
        self._refuse_duplicate(sequence)
        num_full = reservation.num_tokens // self._block_size
        if reservation not in self._reservations:
            raise Refusal("internal", "the reservation was given up")
        if reservation.num_tokens >= len(sequence.token_ids):
            raise Refusal("invalid", "no token to go on from")
        if tuple(sequence.block_hashes[:num_full]) != reservation.block_hashes:
            raise Refusal("invalid", "the tokens handed over are not those of the reserved blocks")
        self._reservations.remove(reservation)
        sequence.block_ids = reservation.block_ids
        sequence.num_computed = reservation.num_tokens
        sequence.num_committed = reservation.num_cached_blocks
        self._enter(sequence)
        self._run(sequence)
        self.commit(sequence)
        if reason := self.finish_reason(sequence):
            self.end(sequence, reason)

    # Sequences start, grow and stop

    def start(self, sequence: Sequence) -> bool:
        """Move it from waiting to running if there is room."""
        if not self.has_slot():
            return False
        shared = self.find(sequence)
        block_ids = self._pool.take(self._initial_need(sequence), shared, self._spare())
        if block_ids is None:
            return False
        sequence.block_ids = block_ids
        sequence.num_committed = len(shared)
        sequence.num_computed = len(shared) * self._block_size
        self.waiting.remove(sequence)
        self._run(sequence)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Make sure that there is a block for the last token of a running sequence, taking blocks from the
        least important one if need be. False when that was the sequence itself. Blocks of a sequence to be
        handed over are never taken: a sender may be reading them, and it does not grow, so it ends by
        itself."""
        while len(sequence.block_ids) < self._blocks_for(len(sequence.token_ids)):
            if block_ids := self._pool.take(1):
                sequence.block_ids += block_ids
                continue
            victim = next(s for s in reversed(self.running) if not s.handoff)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.num_users == 0, "preempted while in use"
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed = sequence.num_committed = 0
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=importance)

    def park(self, sequence: Sequence) -> None:
        """Its prompt is computed: keep the blocks until another worker has them."""
        self.running.remove(sequence)
        self.parked[sequence.key] = sequence
        sequence.state = State.PARKED

    def commit(self, sequence: Sequence) -> None:
        """Tell the pool which blocks are complete now, so that they can be shared."""
        num_full = sequence.num_computed // self._block_size
        if num_full == sequence.num_committed or not self.shares_blocks:
            return
        self.hash(sequence)
        for index in range(sequence.num_committed, num_full):
            self._pool.commit(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.num_committed = num_full

    def hash(self, sequence: Sequence) -> None:
        """Bring ``block_hashes`` up to date with ``token_ids``. Touches nothing but the sequence."""
        root = root_hash(self._fingerprint, sequence.cache_salt)
        extend_hashes(sequence.block_hashes, root, sequence.token_ids, self._block_size)

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of the sequence already."""
        return self._pool.find(sequence.block_hashes[: self.num_shareable(sequence)])

    def num_shareable(self, sequence: Sequence) -> int:
        """Full blocks that leave the last token to be computed: what is sampled next comes from it. Where the
        prompt's log-probabilities are wanted, all tokens must be."""
        if sequence.wants_prompt_logprobs:
            return 0
        return (len(sequence.token_ids) - 1) // self._block_size

    # Sequences end

    def abort(self, key: SequenceKey) -> bool:
        """End a sequence in any state; False when there is none of that name."""
        sequence = self._live.get(key)
        if sequence is not None:
            self.end(sequence, "abort")
        return sequence is not None

    def release(self, key: SequenceKey) -> bool:
        """A parked sequence was taken over elsewhere: it ends here without a word."""
        sequence = self.parked.get(key)
        if sequence is not None:
            sequence.marks[timings.LANDED] = time.monotonic()
            self.close(sequence)
        return sequence is not None

    def expire(self, now: float) -> None:
        """End what is past its deadline."""
        if now < self._next_deadline:
            return
        for sequence in [s for s in self._live.values() if s.deadline <= now]:
            self.end(sequence, "error", WorkerError("deadline", f"{sequence.key.request_id}: time is up"))
        self._next_deadline = min((s.deadline for s in self._live.values()), default=math.inf)

    def end_all(self, error: WorkerError) -> None:
        for sequence in list(self._live.values()):
            self.end(sequence, "error", error)

    def end(self, sequence: Sequence, reason: FinishReason, error: WorkerError | None = None) -> None:
        self.close(sequence)
        self.ended.append(StepOutput(sequence, finish_reason=reason, error=error))

    def close(self, sequence: Sequence) -> None:
        """End it, with nothing noted in ``ended``."""
        del self._live[sequence.key]
        if sequence.state is State.PARKED:
            del self.parked[sequence.key]
        else:
            (self.waiting if sequence.state is State.WAITING else self.running).remove(sequence)
        sequence.state = State.FINISHED
        sequence.marks[timings.FINISHED] = time.monotonic()
        if sequence.num_users:
            self._lingering.add(sequence)
        else:
            self._give_back(sequence)

    def lend(self, sequence: Sequence) -> bool:
        """Keep the sequence's blocks from reuse until ``take_back``. False when it has ended already."""
        if sequence.state is State.FINISHED:
            return False
        sequence.num_users += 1
        return True

    def take_back(self, sequence: Sequence) -> bool:
        """Whether this returned its blocks to the pool."""
        assert sequence.num_users > 0, "taken back more often than lent"
        sequence.num_users -= 1
        if sequence.num_users or sequence not in self._lingering:
            return False
        self._lingering.remove(sequence)
        self._give_back(sequence)
        return True

    # Figures

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        # What is handed over need not fit here beyond its prompt.
        limit = self._max_model_len if sequence.handoff else self.max_sequence_tokens
        return finish_reason(sequence, self._eos_token_ids, limit)

    def has_slot(self) -> bool:
        return len(self.running) + len(self._reservations) < self._max_running

    def is_alone(self) -> bool:
        """Whether there is no second sequence, nor one that is about to be handed over to here."""
        return len(self.running) + len(self.waiting) + len(self._reservations) <= 1

    def num_parked_blocks(self) -> int:
        return sum(len(s.block_ids) for s in self.parked.values())

    def prompt_blocks(self, sequence: Sequence) -> int:
        return self._blocks_for(len(sequence.token_ids))

    def seconds_to_deadline(self, now: float) -> float:
        return max(0.0, self._next_deadline - now)

    def load(self) -> Load:
        return Load(
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            num_queued_tokens=sum(s.num_to_compute for s in self.waiting + self.running),
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            num_parked_blocks=self.num_parked_blocks(),
            num_receiving=len(self._reservations),
        )

    def check(self) -> None:
        """Assert that blocks and sequences are accounted for."""
        holders = [*self.running, *self.parked.values(), *self._lingering]
        self._pool.check([s.block_ids for s in holders] + [r.block_ids for r in self._reservations])
        assert len(self.running) + len(self._reservations) <= self._max_running, "too many are running"
        by_state = {
            State.WAITING: self.waiting,
            State.RUNNING: self.running,
            State.PARKED: list(self.parked.values()),
        }
        for state, sequences in by_state.items():
            assert all(s.state is state and self._live[s.key] is s for s in sequences), f"not {state.value}"
        assert len(self._live) == sum(len(sequences) for sequences in by_state.values()), "a sequence is lost"
        assert not any(s.block_ids or s.num_computed for s in self.waiting), "waits with blocks"
        for sequence in self.running:
            assert 0 <= sequence.num_computed < len(sequence.token_ids), "nothing to compute"
            room = len(sequence.block_ids) * self._block_size
            assert sequence.num_computed <= room, "computed beyond its blocks"

    def _refuse_duplicate(self, sequence: Sequence) -> None:
        if sequence.key in self._live:
            raise Refusal("invalid", f"request {sequence.key.request_id} is here already")

    def _refuse_oversized(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.token_ids)
        if num_tokens + 1 > self._max_model_len:
            limit = f"the limit of {self._max_model_len}"
            raise Refusal("invalid", f"{num_tokens} tokens and one more exceed {limit}")
        need = self._initial_need(sequence)
        if need > self._pool.num_blocks:
            pool = f"the KV cache has {self._pool.num_blocks} blocks of {self._block_size} tokens"
            raise Refusal("invalid", f"{num_tokens} tokens need {need} blocks: {pool}")

    def _enter(self, sequence: Sequence) -> None:
        sequence.arrival = next(self._arrivals)
        self._live[sequence.key] = sequence
        self._next_deadline = min(self._next_deadline, sequence.deadline)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=importance)

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.give_back(sequence.block_ids)
        sequence.block_ids = []

    def _initial_need(self, sequence: Sequence) -> int:
        """Blocks to start with. The token after the last one is computed elsewhere if it is handed over."""
        return self._blocks_for(len(sequence.token_ids) + (0 if sequence.handoff else 1))

    def _spare(self) -> int:
        """Blocks that newcomers leave free: one for each sequence that is going to grow."""
        return sum(not s.handoff for s in self.running) + len(self._reservations)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
