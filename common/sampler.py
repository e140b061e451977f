"""Which token comes next.

A pure function of the logits, the sampling parameters and the tokens so far: randomness is a Philox stream
(Salmon et al., 2011) keyed by (seed, position), so that a sequence continued on another worker, or computed
again, draws the same. Each row is treated alone and gives the same result in any company.

Order of operations, as in vLLM: penalties, logit bias, ``min_tokens``, grammar, temperature, min-p, top-k,
top-p.
Log-probabilities are those of the model, before all that.
"""

import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.grammar import Automaton, GrammarError
from common.messages import Sampling, TokenLogprob, WorkerError
from common.scheduler import Sampled
from common.sequence import Sequence
from kernels import specification

GREEDY_BELOW = 1e-5  # temperatures that leave nothing to chance
NUCLEUS_GUESS = 256  # candidates that usually hold the top-p mass; sorting all costs twenty times as much
NOT_FINITE = WorkerError("internal", "the model's output is not finite")
Choice = tuple[float, float, int, float, float]  # temperature, min-p, top-k (0: all), top-p, chance in [0, 1)


class SamplingOps(NamedTuple):
    """The arithmetic, all sequences of a step in one call."""

    draw: Callable[[list[Tensor], list[Choice]], list[int]]  # a token for each row of logits [V] float32
    # As ``kernels.specification.penalize``, which is quick on CPUs: it looks at the tokens so far alone.
    penalize: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None] = (
        specification.penalize
    )
    # As ``kernels.specification.best_each``.
    best: Callable[[Tensor], tuple[list[int], list[float]]] = specification.best_each


def draw_each(rows: list[Tensor], choices: list[Choice]) -> list[int]:
    return [draw(row, *choice) for row, choice in zip(rows, choices, strict=True)]


def draw(row: Tensor, temperature: float, min_p: float, top_k: int, top_p: float, chance: float) -> int:
    """The token at which the cumulative distribution passes ``chance``."""
    weights = (row - row.max()).div_(temperature).exp_()  # the best token has weight 1
    if min_p > 0:
        weights[weights < min_p] = 0
    if 0 < top_k < len(weights):
        weights[weights < weights.topk(top_k).values[-1]] = 0
    if top_p < 1:
        weights[weights < _nucleus_bound(weights, top_p)] = 0
    cumulative = weights.cumsum(0, dtype=torch.float64)
    index = torch.searchsorted(cumulative, chance * cumulative[-1], right=True)
    return int(index)


PLAIN = SamplingOps(draw_each)


def sample(
    logits: Tensor, sequences: Iterable[Sequence], eos_token_ids: Collection[int], ops: SamplingOps = PLAIN
) -> list[Sampled | WorkerError]:
    """One result per row of ``logits`` [S, V] float32, an error where the row is not finite or its grammar
    cannot go on. Does not change ``logits``."""
    results = _best(logits, ops)
    open_rows = {
        index: (sequence, logits[index])
        for index, (sequence, best) in enumerate(zip(sequences, results, strict=True))
        if not _takes_best(sequence) and isinstance(best, Sampled)
    }
    changed = [index for index, (sequence, _) in open_rows.items() if _changes_logits(sequence)]
    if changed:
        rows = logits[changed]
        found = _adjust(rows, [open_rows[index][0] for index in changed], eos_token_ids, ops)
        for index, row, result in zip(changed, rows, found, strict=True):
            open_rows[index], results[index] = (open_rows[index][0], row), result
    _draw_open(results, open_rows, ops)
    for index, (sequence, _) in open_rows.items():
        result, number = results[index], sequence.sampling.num_logprobs
        if number is not None and isinstance(result, Sampled):
            results[index] = Sampled(result.token_id, logprob_of(logits[index], result.token_id, number))
    return results


def _draw_open(
    results: list[Sampled | WorkerError], open_rows: dict[int, tuple[Sequence, Tensor]], ops: SamplingOps
) -> None:
    """Replace the best tokens of those that leave something to chance."""
    drawn = [
        (index, sequence, row)
        for index, (sequence, row) in open_rows.items()
        if sequence.sampling.temperature >= GREEDY_BELOW and isinstance(results[index], Sampled)
    ]
    if drawn:
        tokens = ops.draw([row for _, _, row in drawn], [_choice(sequence) for _, sequence, _ in drawn])
        for (index, _, _), token_id in zip(drawn, tokens, strict=True):
            results[index] = Sampled(token_id)


def _choice(sequence: Sequence) -> Choice:
    sampling = sequence.sampling
    chance = uniform(sampling.seed, len(sequence.token_ids))
    return sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p, chance


def _best(logits: Tensor, ops: SamplingOps) -> list[Sampled | WorkerError]:
    """The most likely token of each row; an error where the largest value is not finite."""
    token_ids, values = ops.best(logits)
    return [
        Sampled(token_id) if math.isfinite(value) else NOT_FINITE
        for token_id, value in zip(token_ids, values, strict=True)
    ]


def _takes_best(sequence: Sequence) -> bool:
    """Greedy, with nothing that changes the logits or looks at them."""
    sampling = sequence.sampling
    greedy = sampling.temperature < GREEDY_BELOW
    return greedy and sampling.num_logprobs is None and not _changes_logits(sequence)


def _changes_logits(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    too_short = sequence.num_output_tokens < sampling.min_tokens
    is_bound = sequence.automaton is not None
    return too_short or is_bound or bool(sampling.logit_bias) or _has_penalties(sampling)


def _has_penalties(sampling: Sampling) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def _adjust(
    rows: Tensor, sequences: list[Sequence], eos_token_ids: Collection[int], ops: SamplingOps
) -> list[Sampled | WorkerError]:
    """Change the logits ``rows`` [S, V] by all that does not depend on temperature -> what is best then."""
    if any(_has_penalties(sequence.sampling) for sequence in sequences):
        _penalize(rows, sequences, ops)
    errors = [_constrain(row, sequence, eos_token_ids) for row, sequence in zip(rows, sequences, strict=True)]
    return [error or best for error, best in zip(errors, _best(rows, ops), strict=True)]


def _constrain(row: Tensor, sequence: Sequence, eos_token_ids: Collection[int]) -> WorkerError | None:
    sampling, automaton = sequence.sampling, sequence.automaton
    if sampling.logit_bias:
        row[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
    if automaton is not None:
        try:
            automaton.read(sequence.token_ids[sequence.num_prompt_tokens :])
        except GrammarError as error:
            return WorkerError("invalid", str(error))
    if sequence.num_output_tokens < sampling.min_tokens and not (automaton and automaton.is_complete):
        row[[*eos_token_ids, *sampling.stop_token_ids]] = -math.inf
    if automaton is not None:
        row.masked_fill_(_forbidden(automaton, row), -math.inf)
    return None


def _forbidden(automaton: Automaton, row: Tensor) -> Tensor:
    """Whether each token [V] is one that cannot come next."""
    bits = np.unpackbits(np.frombuffer(automaton.mask(), dtype=np.uint8), count=len(row), bitorder="little")
    return torch.from_numpy(bits == 0).to(row.device)


def _penalize(rows: Tensor, sequences: list[Sequence], ops: SamplingOps) -> None:
    """By the tokens so far; a sequence without penalties has none that count."""
    token_ids, owners, is_output = [], [], []
    for index, sequence in enumerate(sequences):
        if _has_penalties(sequence.sampling):
            token_ids += sequence.token_ids
            owners += [index] * len(sequence.token_ids)
            is_output += [False] * sequence.num_prompt_tokens + [True] * sequence.num_output_tokens
    kinds = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = [[getattr(sequence.sampling, kind) for sequence in sequences] for kind in kinds]
    ops.penalize(
        rows,
        torch.tensor(token_ids, device=rows.device),
        torch.tensor(owners, dtype=torch.int32, device=rows.device),
        torch.tensor(is_output, device=rows.device),
        *(torch.tensor(values, dtype=torch.float32, device=rows.device) for values in penalties),
    )


def _nucleus_bound(weights: Tensor, top_p: float) -> Tensor:
    """The smallest weight among the most likely tokens that together reach ``top_p`` (Holtzman et al.,
    2020)."""
    target = top_p * weights.sum(dtype=torch.float64)
    count = min(NUCLEUS_GUESS, len(weights))
    while True:
        best = weights.topk(count).values
        cumulative = best.cumsum(0, dtype=torch.float64)
        if count == len(weights) or cumulative[-1] >= target:
            index = int(torch.searchsorted(cumulative, target))
            return best[min(index, count - 1)]
        count = min(16 * count, len(weights))


def logprob_of(row: Tensor, token_id: int, num_logprobs: int) -> TokenLogprob:
    """Of the token, and of the most likely ones, by logits [V]."""
    logprobs = row.log_softmax(0)
    top = logprobs.topk(min(num_logprobs, len(row)))
    alternatives = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), alternatives)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position).random_raw()
    return int(bits >> 11) * 2.0**-53
