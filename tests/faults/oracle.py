"""What a single process would have answered: the same engine alone, without proxy, transfer or other
workers."""

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from common import startup
from common.config import EngineConfig, TransferConfig, WorkerConfig
from common.engine import Engine
from common.messages import Sampling
from common.sequence import Sequence as EngineSequence
from common.sequence import SequenceKey

NEAR_TIE = 1e-3  # log-probability gap below which rounding may decide between two tokens
NUM_BLOCKS = 4096


class Case(msgspec.Struct, frozen=True):
    """A request as the oracle and the client see it; always run to ``max_tokens``."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Reference(NamedTuple):
    token_ids: tuple[int, ...]
    gaps: tuple[
        float, ...
    ]  # between the two best log-probabilities; infinite where a token was drawn by chance


class Oracle:
    """Float32 on one thread. Remembers what it has worked out."""

    def __init__(self, model: str | Path) -> None:
        self._known: dict[Case, Reference] = {}
        self._engine = single_process_engine(str(model))

    def reference(self, case: Case) -> Reference:
        return self.references([case])[0]

    def references(self, cases: Iterable[Case]) -> list[Reference]:
        wanted = list(cases)
        self._compute([case for case in dict.fromkeys(wanted) if case not in self._known])
        return [self._known[case] for case in wanted]

    def _compute(self, cases: Sequence[Case]) -> None:
        running: dict[SequenceKey, Case] = {}
        tokens: dict[SequenceKey, list[tuple[int, float]]] = {}
        for index, case in enumerate(cases):
            sequence = sequence_of(case, str(index))
            running[sequence.key], tokens[sequence.key] = case, []
            self._engine.add(sequence)
        while running:
            for output in self._engine.step():
                key = output.sequence.key
                assert output.error is None, output.error
                for token_id, logprob in zip(output.token_ids, output.logprobs, strict=True):
                    tokens[key].append((token_id, gap(logprob.top)))
                if output.finish_reason is not None:
                    case = running.pop(key)
                    self._known[case] = reference_of(case, tokens[key])


def reference_of(case: Case, tokens: Sequence[tuple[int, float]]) -> Reference:
    drawn = case.temperature > 0
    return Reference(
        token_ids=tuple(token_id for token_id, _ in tokens),
        gaps=tuple(math.inf if drawn else distance for _, distance in tokens),
    )


def gap(top: Sequence[tuple[int, float]]) -> float:
    (_, best), (_, second) = top[:2]
    return best - second


def sequence_of(case: Case, request_id: str) -> EngineSequence:
    return EngineSequence(
        key=SequenceKey(request_id, 0),
        token_ids=list(case.prompt),
        num_prompt_tokens=len(case.prompt),
        sampling=Sampling(
            max_tokens=case.max_tokens,
            temperature=case.temperature,
            seed=case.seed,
            ignore_eos=True,
            num_logprobs=2,
        ),
        deadline=time.monotonic() + 3600,
    )


def single_process_engine(model: str) -> Engine:
    config = EngineConfig(
        model=model,
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        max_waiting_seqs=1 << 20,
        enable_prefix_caching=False,
    )
    torch.set_num_threads(1)  # workers need the other cores
    setup = startup.Setup(
        role="decode",
        name="oracle",
        incarnation="oracle",
        engine=config,
        transfer=TransferConfig(),
        worker=WorkerConfig(),
        num_threads=1,
    )
    return startup.build_engine(setup)
