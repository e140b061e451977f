"""The engine: one thread that turns sequences into tokens, step by step.

Every step plans, runs, samples and records. All public methods may be called from any thread; they hold the
lock for bookkeeping only, so none of them waits for a computation, and what they change takes effect with
the next step.

What happened is told to ``on_step``, always in the engine's thread: new tokens, progress of prompts that are
to be handed over, and ends, each sequence having exactly one of these, save for what is released to another
worker. A prompt that is to be handed over is told of before its first step, when it has got its blocks: from
then on nothing that happens elsewhere can keep it from being computed. While nothing can be computed, the
thread sleeps until something is changed or a deadline comes.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Protocol

import torch
from torch import Tensor

from common import gpu, timings
from common.batch import Batch, build
from common.cache import Cache
from common.config import EngineConfig
from common.device_blocks import DeviceBlocks
from common.grammar import GrammarError, Grammars
from common.messages import Histogram, Load, ModelInfo, Pace, Refusal, WorkerError
from common.pool import BlockPool, CacheEvents
from common.prompt_logprobs import note_prompt_logprobs
from common.roster import Reservation, Roster
from common.sampler import PLAIN, SamplingOps, sample
from common.scheduler import Sampled, Scheduler, Work
from common.sequence import Sequence, SequenceKey, StepOutput
from common.step_meter import StepMeter
from common.stopping import check_sequence
from kernels import AttentionBatch, Watch

__all__ = ["Engine", "LanguageModel", "Refusal", "Reservation"]

logger = logging.getLogger(__name__)

LONGEST_SLEEP_S = 3600.0


class LanguageModel(Protocol):
    def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: list[Tensor]) -> Tensor:
        """``token_ids`` [T] -> hidden states [R, I] of the batch's output rows; stores keys and values in
        ``caches``, one [N, 2, G, B, D] a layer."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, I] -> [S, V] float32."""
        ...


OnStep = Callable[[list[StepOutput]], None]
Watcher = Callable[[list[Work]], Watch | None]  # of the step that computes this work


class Engine:
    def __init__(
        self,
        language_model: LanguageModel,
        cache: Cache,
        model: ModelInfo,
        config: EngineConfig,
        eos_token_ids: Collection[int],
        max_parked_blocks: int | None = None,
        grammars: Grammars | None = None,
        sampling: SamplingOps = PLAIN,
    ) -> None:
        """Without ``grammars``, sequences that must follow one are refused."""
        self._sampling = sampling
        self.cache = cache
        self.layout = cache.layout
        self.model = model
        self._language_model = language_model
        self._grammars = grammars
        self._checks = config.check_invariants
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pool = BlockPool(cache.num_blocks, config.enable_prefix_caching)
        self._roster = Roster(config, self._pool, model.fingerprint, model.max_model_len, eos_token_ids)
        max_parked_blocks = cache.num_blocks if max_parked_blocks is None else max_parked_blocks
        self._scheduler = Scheduler(
            self._roster, config.step_tokens, config.lone_step_tokens, max_parked_blocks
        )
        self.max_sequence_tokens = self._roster.max_sequence_tokens
        self._changed = threading.Condition()
        self._stopping = False
        self._on_step: OnStep | None = None
        self._watcher: Watcher | None = None
        self._meter = StepMeter(config.step_tokens)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # The thread

    def start(self, on_step: OnStep, watcher: Watcher | None = None) -> None:
        """``on_step`` hears what happened, in the engine's thread; it should pass it on and return. So should
        who is told of a step's layers; ``watcher`` names them."""
        self._on_step, self._watcher = on_step, watcher
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after the step under way, and every sequence with an error. False when the step
        took too long: then the thread is left behind."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._end_all(WorkerError("draining", "the worker stops"))
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether sequences are served: started, not stopped, and not broken."""
        return self._thread.is_alive() and not self._stopping

    def _run(self) -> None:
        try:
            gpu.use(self.cache.device)
            while not self._stopping:
                self._tell(self.step(wait=True))
        except Exception:
            # Not a failed computation, which step handles, but books that do not add up.
            logger.exception("the engine is broken and ends")
            self._stopping = True
            self._end_all(WorkerError("internal", "the engine is broken"))

    def step(self, wait: bool = False) -> list[StepOutput]:
        """Plan, run, sample, record. Returns what happened; with ``wait``, sleeps first until something
        can."""
        works, started = self._plan(wait)
        self._tell(started)
        sampled = self._compute(works)
        with self._changed:
            if sampled is None:
                outputs = self._scheduler.fail(works, WorkerError("internal", "a step failed"))
            else:
                outputs = self._scheduler.record(works, sampled)
            if self._checks:
                self._roster.check()
        return outputs

    def _plan(self, wait: bool) -> tuple[list[Work], list[StepOutput]]:
        with self._changed:
            while True:
                now = time.monotonic()
                works = self._scheduler.plan(now)
                if works or self._roster.ended or self._stopping or not wait:
                    self._meter.planned(now)
                    return works, self._scheduler.take_started()
                self._changed.wait(min(LONGEST_SLEEP_S, self._roster.seconds_to_deadline(now)))

    def _compute(self, works: list[Work]) -> list[Sampled | WorkerError] | None:
        """None when it went wrong."""
        if not works:
            return []
        began_at = time.monotonic()
        try:
            with torch.inference_mode():
                watch = self._watcher(works) if self._watcher is not None else None
                batch = build(works, self.layout.block_size, self.cache.device, watch)
                built_at = time.monotonic()
                sampled = self._forward(works, batch)
            self._meter.computed(works, began_at, built_at)
            return sampled
        except Exception:
            logger.exception("a step with %d sequences failed", len(works))
            return None

    def _forward(self, works: list[Work], batch: Batch) -> list[Sampled | WorkerError]:
        hidden = self._language_model.forward(batch.token_ids, batch.attention, self.cache.layers)
        note_prompt_logprobs(works, hidden, self._language_model.logits)
        sampling = [work.sequence for work in works if work.samples]
        if not sampling:
            gpu.wait(self.cache.device)
            return []
        if batch.sample_rows is not None:
            hidden = hidden[batch.sample_rows]
        logits = self._language_model.logits(hidden)
        return sample(logits, sampling, self._eos_token_ids, self._sampling)

    def _end_all(self, error: WorkerError) -> None:
        with self._changed:
            self._roster.end_all(error)
            outputs = self._scheduler.take_ended()
        self._tell(outputs)

    def _tell(self, outputs: list[StepOutput]) -> None:
        if outputs and self._on_step is not None:
            try:
                self._on_step(outputs)
            except Exception:
                logger.exception("on_step failed: %d outputs are lost", len(outputs))

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ``Refusal`` when it is invalid, can never fit, or the queue is full."""
        self._examine(sequence)
        sequence.marks[timings.QUEUED] = time.monotonic()
        with self._changed:
            self._refuse_when_stopping()
            self._roster.add(sequence)
            self._changed.notify_all()

    def abort(self, key: SequenceKey, reason: str = "") -> bool:
        """End a sequence in whatever state with ``finish_reason`` "abort"; False when there is none of that
        name."""
        logger.debug("abort %s: %s", key, reason)
        with self._changed:
            found = self._roster.abort(key)
            self._changed.notify_all()
        return found

    def load(self) -> Load:
        with self._changed:
            return self._roster.load()

    def counters(self) -> dict[str, float]:
        """Totals since the start, by metric name."""
        with self._changed:
            totals = asdict(self._scheduler.counters) | {"num_preemptions": self._roster.num_preemptions}
        return {f"{name.removeprefix('num_')}_total": float(value) for name, value in totals.items()}

    def histograms(self) -> dict[str, Histogram]:
        """What steps took, by metric name."""
        return self._meter.histograms()

    def take_events(self) -> CacheEvents:
        """Block hashes that came and went since the last call."""
        with self._changed:
            return self._pool.take_events()

    def cached_hashes(self) -> tuple[CacheEvents, tuple[bytes, ...]]:
        """What ``take_events`` returns, and all block hashes known at that moment."""
        with self._changed:
            return self._pool.take_events(), self._pool.hashes()

    def pace(self) -> Pace:
        return self._meter.stopwatch.pace

    # Prefill side of a hand-over

    def lend(
        self, sequence: Sequence, first: int, count: int, layers: range | None = None
    ) -> list[memoryview] | None:
        """Bytes of ``count`` blocks of the sequence from its ``first`` on, or of some layers of each. All its
        blocks are kept from reuse until ``take_back``. None once the sequence has ended: then there is
        nothing to take back."""
        block_ids = self._lent_ids(sequence, first, count)
        return None if block_ids is None else self.cache.read(block_ids, layers)

    def _lent_ids(self, sequence: Sequence, first: int, count: int) -> list[int] | None:
        with self._changed:
            if not self._roster.lend(sequence):
                return None
            return sequence.block_ids[first : first + count]

    @property
    def on_device(self) -> "Engine | None":
        """Itself where blocks lie in the memory of a device, for transports that reach into it."""
        return self if self.cache.is_on_device else None

    def lend_in_place(self, sequence: Sequence, first: int, count: int) -> DeviceBlocks | None:
        """As ``lend``: the blocks themselves, in the memory of a device."""
        block_ids = self._lent_ids(sequence, first, count)
        return None if block_ids is None else self.cache.in_place(block_ids)

    def take_back(self, sequence: Sequence) -> None:
        with self._changed:
            if self._roster.take_back(sequence):
                self._changed.notify_all()

    def release(self, key: SequenceKey) -> bool:
        """A decode worker has taken the parked sequence over: free its blocks. They stay in the prefix
        cache."""
        with self._changed:
            found = self._roster.release(key)
            self._changed.notify_all()
        return found

    # Decode side of a hand-over

    def reserve(self, num_tokens: int, block_hashes: tuple[bytes, ...]) -> Reservation | None:
        """Room for a sequence of ``num_tokens`` computed tokens to land and go on; None: not now, try again
        when a sequence has ended or a reservation was given back. Raises ``Refusal`` when there never will
        be room."""
        with self._changed:
            self._refuse_when_stopping()
            return self._roster.reserve(num_tokens, block_hashes)

    def landing_views(
        self, reservation: Reservation, first: int, count: int, layers: range | None = None
    ) -> list[memoryview]:
        """Where ``count`` of the reserved blocks from the ``first`` on, or some layers of each, are to be
        written. The blocks must not be written any more once the reservation is cancelled or adopted."""
        assert first >= reservation.num_cached_blocks, "these blocks are shared: they have content"
        return self.cache.landing(reservation.block_ids[first : first + count], layers)

    def landing_in_place(self, reservation: Reservation, first: int, count: int) -> DeviceBlocks:
        """The same, in the memory of a device; there is no need to call ``landed``."""
        assert first >= reservation.num_cached_blocks, "these blocks are shared: they have content"
        return self.cache.in_place(reservation.block_ids[first : first + count])

    def landed(
        self,
        reservation: Reservation,
        first: int,
        count: int,
        views: list[memoryview],
        layers: range | None = None,
    ) -> None:
        """What was written to ``landing_views`` is right: it is the blocks' content."""
        self.cache.landed(reservation.block_ids[first : first + count], views, layers)

    def cancel(self, reservation: Reservation) -> None:
        """Give the reserved blocks back. Safe to repeat."""
        with self._changed:
            self._roster.cancel(reservation)
            self._changed.notify_all()

    def adopt(self, reservation: Reservation, sequence: Sequence) -> None:
        """Run a sequence whose first tokens have landed. Raises ``Refusal``, the reservation still to be
        cancelled."""
        self._examine(sequence)
        sequence.marks[timings.ADOPTED] = time.monotonic()
        with self._changed:
            self._refuse_when_stopping()
            self._roster.adopt(reservation, sequence)
            self._changed.notify_all()

    def _examine(self, sequence: Sequence) -> None:
        """What takes time and needs no lock. Raises ``Refusal``."""
        check_sequence(sequence, self.model.vocab_size)
        self._roster.hash(sequence)
        if sequence.sampling.grammar:
            if self._grammars is None:
                raise Refusal("invalid", "grammars are not supported by this worker")
            try:
                sequence.automaton = self._grammars.compile(sequence.sampling.grammar)
            except GrammarError as error:
                raise Refusal("invalid", f"grammar: {error}") from error

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise Refusal("draining", "the worker stops")
