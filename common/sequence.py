"""A sequence: a request as an engine sees it.

    WAITING   in the queue; holds no blocks
    RUNNING   holds blocks for all its tokens, takes part in steps
    PARKED    a prompt whose first token is sampled, its blocks waiting to be taken by a decode worker
    FINISHED  ended; holds nothing, or only what a running step or a sender still uses

``token_ids`` always holds all tokens known, ``num_computed`` of which have their keys and values in the
blocks. A step closes part of that gap; when it closes all of it, the next token is sampled and appended.
Prefill, chunked prefill, decode and recompute after preemption are this one case.
"""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from common.grammar import Automaton
from common.messages import FinishReason, Generate, Sampling, TokenLogprob, WorkerError


class SequenceKey(NamedTuple):
    request_id: str
    attempt: int


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


@dataclass(slots=True)
class Cost:
    """What the steps took that had tokens of a sequence, whoever else was in them."""

    kernel_s: float = 0.0  # the model and the choice of tokens
    cache_s: float = 0.0  # taking blocks, planning, block tables


@dataclass(slots=True, eq=False)
class Sequence:
    key: SequenceKey
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    deadline: float  # time.monotonic()
    priority: int = 0  # lower is served first
    cache_salt: str = ""
    trace: str = ""  # W3C traceparent of the span that this is part of
    handoff: bool = False  # park after the first new token instead of going on
    state: State = State.WAITING
    arrival: int = 0  # rank among sequences of one priority, given by the scheduler
    num_computed: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose blocks were found in the prefix cache
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks known so far
    num_committed: int = 0  # leading blocks that the pool knows by hash
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the second prompt token and on
    automaton: Automaton | None = None  # of the grammar that the output follows
    num_users: int = 0  # steps and senders that use the blocks right now
    marks: dict[str, float] = field(default_factory=dict)  # time.monotonic() by name, see common/timings.py
    prefill_cost: Cost = field(default_factory=Cost)  # until this engine's first token of it
    decode_cost: Cost = field(default_factory=Cost)  # from there on

    @classmethod
    def from_generate(cls, message: Generate, handoff: bool) -> "Sequence":
        return cls(
            key=SequenceKey(message.request_id, message.attempt),
            token_ids=list(message.token_ids),
            num_prompt_tokens=message.num_prompt_tokens,
            sampling=message.sampling,
            deadline=time.monotonic() + message.deadline_s,
            priority=message.priority,
            cache_salt=message.cache_salt,
            trace=message.trace,
            handoff=handoff,
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some may still be missing; they are told with the first output."""
        return self.sampling.num_prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed


class StepOutput(NamedTuple):
    """What happened to one sequence: new tokens, progress of its prefill, or its end."""

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: WorkerError | None = None
