import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.sampler import NOT_FINITE, sample, uniform
from common.scheduler import Sampled
from common.sequence import Sequence
from tests.common.toy import make_sequence

EOS = 5


def logits_of(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


def sample_one(logits: Tensor, output: list[int] | None = None, **sampling: Any) -> int:
    result = sample(logits, [make(output, **sampling)], [EOS])[0]
    assert isinstance(result, Sampled)
    return result.token_id


def make(output: list[int] | None = None, prompt: list[int] | None = None, **sampling: Any) -> Sequence:
    prompt = prompt or [0]
    return make_sequence("r", prompt + (output or []), num_prompt_tokens=len(prompt), **sampling)


def draws(logits: Tensor, count: int = 400, **sampling: Any) -> Counter[int]:
    """What comes out with ``count`` different seeds."""
    return Counter(sample_one(logits, seed=seed, **sampling) for seed in range(count))


# Randomness


def test_chance_depends_on_seed_and_position_alone() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    numbers = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 400 - 0.5) < 0.05


def test_chance_stays_the_same_from_release_to_release() -> None:
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(-1, 7) == uniform(2**64 - 1, 7)


def test_draws_follow_the_distribution() -> None:
    probabilities = [0.5, 0.25, 0.15, 0.1]
    counts = draws(logits_of(*map(math.log, probabilities)), 4000, temperature=1.0)
    for token_id, probability in enumerate(probabilities):
        assert counts[token_id] / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_flattens_the_distribution() -> None:
    logits = logits_of(0.0, math.log(4.0))
    assert draws(logits, 4000, temperature=2.0)[1] / 4000 == pytest.approx(2 / 3, abs=0.03)
    assert draws(logits, temperature=0.0) == {1: 400}
    assert draws(logits, temperature=1e-6) == {1: 400}
    assert draws(logits * 1e4, temperature=1e-4) == {1: 400}


def test_the_same_seed_gives_the_same_token_at_the_same_position_only() -> None:
    logits = torch.zeros(1, 1000)
    tokens = [sample_one(logits, [0] * position, temperature=1.0, seed=9) for position in range(50)]
    assert tokens == [sample_one(logits, [1] * position, temperature=1.0, seed=9) for position in range(50)]
    assert len(set(tokens)) > 40


def test_a_very_unlikely_token_is_never_the_one_at_the_end_of_the_scale() -> None:
    logits = torch.full((1, 64), -math.inf)
    logits[0, 3] = 0.0
    assert draws(logits, temperature=1.0) == {3: 400}


# Filters


def expected_support(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    order = [i for i in order if probabilities[i] >= min_p * probabilities[order[0]]]
    if top_k:
        order = order[:top_k]
    total, kept = sum(probabilities[i] for i in order), 0.0
    support = set()
    for i in order:
        if kept >= top_p * total:
            break
        support.add(i)
        kept += probabilities[i]
    return support


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=12, unique=True),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21]),
)
def test_filters_keep_the_tokens_they_are_defined_to_keep(
    weights: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    probabilities = [weight / sum(weights) for weight in weights]
    support = expected_support(probabilities, top_k, top_p, min_p)
    flat = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    seen = set(draws(logits_of(*map(math.log, probabilities)), 30, **flat))
    assert seen <= support
    if len(support) == 1:
        assert seen == support


def test_filters_leave_every_kept_token_its_chance() -> None:
    logits = logits_of(*map(math.log, (0.4, 0.3, 0.2, 0.1)))
    assert set(draws(logits, temperature=1.0, top_k=2)) == {0, 1}
    assert set(draws(logits, temperature=1.0, top_p=0.71)) == {0, 1, 2}
    assert set(draws(logits, temperature=1.0, min_p=0.45)) == {0, 1, 2}
    assert set(draws(logits, temperature=1.0, top_k=3, top_p=0.4)) == {0}
    assert draws(logits, temperature=1.0, top_p=0.0) == {0: 400}


def test_the_nucleus_may_be_larger_than_the_first_guess() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4000:] = -30.0
    seen = draws(logits, 300, temperature=1.0, top_p=0.999)
    assert max(seen) < 4000
    assert len(seen) > 250


# Penalties, bias, minimum length


def test_repetition_penalty_counts_prompt_and_output_once_each() -> None:
    logits = logits_of(4.0, 3.0, 2.9, -1.0, -1.1, -9.0)
    assert sample_one(logits, temperature=0.0, repetition_penalty=1.3) == 0  # 4 / 1.3 is still the best
    assert sample_one(logits, temperature=0.0, repetition_penalty=1.4) == 1
    assert sample_one(logits, [1, 1, 1], temperature=0.0, repetition_penalty=1.38) == 2
    negative = logits_of(-1.0, -1.1, -9.0, -9.0, -9.0, -9.0)
    assert sample_one(negative, temperature=0.0, repetition_penalty=1.2) == 1


def test_presence_and_frequency_penalties_count_output_only() -> None:
    logits = logits_of(4.0, 3.5, 3.0, 0.0, 0.0, 0.0)
    assert sample_one(logits, temperature=0.0, presence_penalty=2.0) == 0  # 0 is in the prompt
    assert sample_one(logits, [0, 0, 0], temperature=0.0, presence_penalty=0.4) == 0
    assert sample_one(logits, [0], temperature=0.0, presence_penalty=0.6) == 1
    assert sample_one(logits, [0, 0, 0], temperature=0.0, frequency_penalty=0.2) == 1
    assert sample_one(logits, [0, 0, 0, 1, 1], temperature=0.0, frequency_penalty=0.4) == 2
    assert sample_one(logits, [2, 2, 2], temperature=0.0, frequency_penalty=-0.5) == 2


def test_bias_is_added_to_the_logits() -> None:
    logits = logits_of(4.0, 3.0, 2.0)
    assert sample_one(logits, temperature=0.0, logit_bias={0: -100.0}) == 1
    assert sample_one(logits, temperature=0.0, logit_bias={0: -100.0, 2: 1.5}) == 2
    assert set(draws(logits, temperature=1.0, logit_bias={1: 100.0})) == {1}


def test_no_end_before_the_minimum_length() -> None:
    logits = logits_of(1.0, 2.0, 0.0, 0.0, 0.0, 9.0)
    sampling: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1,)}
    assert [sample_one(logits, [3] * n, **sampling) for n in range(4)] == [0, 0, 5, 5]
    assert draws(logits, temperature=1.0, min_tokens=1)[EOS] == 0


# Log-probabilities


def test_logprobs_are_the_models_own() -> None:
    probabilities = (0.5, 0.3, 0.2)
    sequence = make(temperature=0.5, logit_bias={0: -100.0, 1: -100.0}, num_logprobs=2)
    (result,) = sample(logits_of(*map(math.log, probabilities)), [sequence], [EOS])
    assert isinstance(result, Sampled)
    assert result.token_id == 2
    assert result.logprob is not None
    assert result.logprob.token_id == 2
    assert result.logprob.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [token_id for token_id, _ in result.logprob.top] == [0, 1]
    assert [p for _, p in result.logprob.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)


@pytest.mark.parametrize(("num_logprobs", "num_top"), [(0, 0), (1, 1), (99, 3)])
def test_as_many_alternatives_as_asked_for_and_there_are(num_logprobs: int, num_top: int) -> None:
    (result,) = sample(logits_of(1.0, 2.0, 3.0), [make(num_logprobs=num_logprobs)], [EOS])
    assert isinstance(result, Sampled)
    assert result.logprob is not None
    assert len(result.logprob.top) == num_top


# Company


MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "num_logprobs": 4},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9},
    {"temperature": 1.3, "seed": 3, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "num_logprobs": 0},
    {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {3: 5.0}},
    {"temperature": 0.9, "seed": 5, "min_tokens": 50, "stop_token_ids": (7,)},
]


def test_a_row_gives_the_same_alone_and_in_company() -> None:
    logits = torch.randn(len(MIXTURE), 3001, generator=torch.Generator().manual_seed(0)) * 3
    sequences = [make([1, 2, 3, 2], [4, 3], **sampling) for sampling in MIXTURE]
    before = logits.clone()
    together = sample(logits, sequences, [EOS])
    assert torch.equal(logits, before)
    for order in (range(len(MIXTURE)), reversed(range(len(MIXTURE)))):
        for index in order:
            assert sample(logits[index : index + 1], [sequences[index]], [EOS]) == [together[index]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_nothing(value: float, temperature: float) -> None:
    logits = torch.randn(3, 50)
    logits[1, 20] = value
    results = sample(logits, [make(temperature=temperature) for _ in range(3)], [EOS])
    assert [result == NOT_FINITE for result in results] == [False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_chosen_where_every_token_is_forbidden(temperature: float) -> None:
    logits = logits_of(-math.inf, 2.0, -math.inf)
    assert sample(logits, [make(temperature=temperature, min_tokens=1, stop_token_ids=(1,))], []) == [
        NOT_FINITE
    ]
