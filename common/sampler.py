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

import numpy as np
import torch
from torch import Tensor

from common.grammar import Automaton, GrammarError
from common.messages import Sampling, TokenLogprob, WorkerError
from common.scheduler import Sampled
from common.sequence import Sequence

GREEDY_BELOW = 1e-5  # temperatures that leave nothing to chance
NUCLEUS_GUESS = 256  # candidates that usually hold the top-p mass; sorting all costs twenty times as much
# (logits [V] float32, temperature, min_p, top_k, top_p, chance in [0, 1)) -> token
Draw = Callable[[Tensor, float, float, int, float, float], int]
NOT_FINITE = WorkerError("internal", "the model's output is not finite")


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


def sample(
    logits: Tensor, sequences: Iterable[Sequence], eos_token_ids: Collection[int], draw: Draw = draw
) -> list[Sampled | WorkerError]:
    """One result per row of ``logits`` [S, V] float32, an error where the row is not finite or its grammar
    cannot go on. Does not change ``logits``."""
    best = _best(logits)  # not a number counts as best
    values, token_ids = logits.gather(1, best[:, None]).flatten().tolist(), best.tolist()
    results: list[Sampled | WorkerError] = []
    for row, sequence, value, token_id in zip(logits, sequences, values, token_ids, strict=True):
        if not math.isfinite(value):
            results.append(NOT_FINITE)
        elif _takes_best(sequence):
            results.append(Sampled(token_id))
        else:
            results.append(_sample_row(row, sequence, eos_token_ids, draw))
    return results


def _best(logits: Tensor) -> Tensor:
    """Index of the largest value along the last dimension."""
    if logits.device.type == "cpu":
        return torch.as_tensor(logits.numpy().argmax(-1))  # torch's own takes eight times as long
    return logits.argmax(-1)


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


def _sample_row(
    row: Tensor, sequence: Sequence, eos_token_ids: Collection[int], draw: Draw
) -> Sampled | WorkerError:
    sampling = sequence.sampling
    try:
        adjusted = _adjust(row, sequence, eos_token_ids)
    except GrammarError as error:
        return WorkerError("invalid", str(error))
    if adjusted is not row and not math.isfinite(adjusted.max()):
        return NOT_FINITE
    if sampling.temperature < GREEDY_BELOW:
        token_id = int(_best(adjusted))
    else:
        chance = uniform(sampling.seed, len(sequence.token_ids))
        token_id = draw(
            adjusted, sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p, chance
        )
    if sampling.num_logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, logprob_of(row, token_id, sampling.num_logprobs))


def _adjust(row: Tensor, sequence: Sequence, eos_token_ids: Collection[int]) -> Tensor:
    """The logits [V] after all that does not depend on temperature; ``row`` itself where that is nothing."""
    sampling = sequence.sampling
    if not _changes_logits(sequence):
        return row
    row = row.clone()
    if _has_penalties(sampling):
        _penalize(row, sequence)
    if sampling.logit_bias:
        row[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
    automaton = sequence.automaton
    if automaton is not None:
        automaton.read(sequence.token_ids[sequence.num_prompt_tokens :])
    if sequence.num_output_tokens < sampling.min_tokens and not (automaton and automaton.is_complete):
        row[[*eos_token_ids, *sampling.stop_token_ids]] = -math.inf
    if automaton is not None:
        row.masked_fill_(_forbidden(automaton, row), -math.inf)
    return row


def _forbidden(automaton: Automaton, row: Tensor) -> Tensor:
    """Whether each token [V] is one that cannot come next."""
    bits = np.unpackbits(np.frombuffer(automaton.mask(), dtype=np.uint8), count=len(row), bitorder="little")
    return torch.from_numpy(bits == 0).to(row.device)


def _penalize(row: Tensor, sequence: Sequence) -> None:
    """Repetition (Keskar et al., 2019) looks at prompt and output, presence and frequency (OpenAI) at the
    output."""
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sequence.token_ids, device=row.device)
        logits = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        output = torch.tensor(sequence.token_ids[sequence.num_prompt_tokens :], dtype=torch.int64)
        counts = torch.bincount(output, minlength=len(row)).to(row.device)
        row -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


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
