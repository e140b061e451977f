"""How likely the model found the prompt: the log-probability of each of its tokens but the first."""

from collections.abc import Callable, Sequence

from torch import Tensor

from common.sampler import logprob_of
from common.scheduler import Work

ROWS_AT_A_TIME = 64  # of logits, which are as long as the vocabulary


def note_prompt_logprobs(
    works: Sequence[Work], hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> None:
    """For sequences that want them, from the hidden states [R, I] of a step's output rows. A row speaks of
    the token after its own. What a preemption has computed once more is not noted again."""
    first_row = 0
    for work in works:
        if work.sequence.wants_prompt_logprobs:
            rows = hidden[first_row : first_row + work.num_tokens]
            _note(work, rows, logits_of)
        first_row += work.num_outputs


def _note(work: Work, rows: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    sequence, known = work.sequence, work.sequence.prompt_logprobs
    num_logprobs = sequence.sampling.num_prompt_logprobs
    assert num_logprobs is not None
    begin = len(known) - work.start
    end = min(work.num_tokens, sequence.num_prompt_tokens - 1 - work.start)
    for first in range(begin, end, ROWS_AT_A_TIME):
        last = min(first + ROWS_AT_A_TIME, end)
        for offset, row in zip(range(first, last), logits_of(rows[first:last]), strict=True):
            known.append(logprob_of(row, sequence.token_ids[work.start + offset + 1], num_logprobs))
