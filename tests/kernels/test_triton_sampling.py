"""Drawing tokens for many sequences at once."""

import math

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import specification
from kernels.triton import sampling
from tests.kernels.cases import sampled

pytestmark = pytest.mark.usefixtures("poison")
SEQUENCE = st.tuples(
    st.sampled_from([0.05, 0.7, 1.0, 3.0]),  # temperature
    st.sampled_from([0.0, 0.02, 0.3]),  # min-p
    st.sampled_from([0, 1, 2, 40, 100_000]),  # top-k
    st.sampled_from([1.0, 0.9, 0.3, 0.0]),  # top-p
    st.floats(0, 1, exclude_max=True),  # chance
)


def logits_of(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed))


def choices_of(sequences: list[tuple[float, float, int, float, float]]) -> Tensor:
    return torch.tensor(sequences, dtype=torch.float64)


@sampled(25, sequences=st.lists(SEQUENCE, min_size=1, max_size=4), num_tokens=st.sampled_from([1, 50, 5000]))
def test_draws_what_is_specified(
    sequences: list[tuple[float, float, int, float, float]], num_tokens: int
) -> None:
    logits = logits_of(len(sequences), num_tokens)
    drawn = sampling.draw_each(logits, choices_of(sequences))
    # Sums in another order may differ in their last bits: a chance may lie on the border of two tokens.
    nearby = [[nudged(sequence, by) for sequence in sequences] for by in (-1e-9, 0, 1e-9)]
    allowed = torch.stack([specification.draw_each(logits, choices_of(choice)) for choice in nearby])
    assert (drawn == allowed).any(0).all()


def nudged(
    sequence: tuple[float, float, int, float, float], by: float
) -> tuple[float, float, int, float, float]:
    return *sequence[:4], min(max(sequence[4] + by, 0.0), math.nextafter(1.0, 0.0))


def test_the_best_token_is_all_that_a_narrow_choice_leaves() -> None:
    logits = logits_of(3, 300)
    narrow = choices_of([(1.0, 0.0, 1, 1.0, 0.99), (1.0, 0.0, 0, 0.0, 0.99), (1.0, 1.0, 0, 1.0, 0.99)])
    assert torch.equal(sampling.draw_each(logits, narrow), logits.argmax(-1))


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    logits = logits_of(3, 5000)
    sequences = [(0.7, 0.0, 40, 0.9, 0.3), (1.0, 0.1, 0, 1.0, 0.8), (2.0, 0.0, 0, 0.5, 0.1)]
    together = sampling.draw_each(logits, choices_of(sequences)).tolist()
    assert sampling.draw(list(logits), sequences) == together
    assert [
        sampling.draw([row], [choice])[0] for row, choice in zip(logits, sequences, strict=True)
    ] == together


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    logits = torch.tensor([[0.0, math.log(2.0), -math.inf, math.log(5.0)]]).expand(80, 4).contiguous()
    chances = [(1.0, 0.0, 0, 1.0, (row + 0.5) / 80) for row in range(80)]
    counts = sampling.draw_each(logits, choices_of(chances)).bincount(minlength=4)
    assert counts.tolist() == [10, 20, 0, 50]


@sampled(
    12,
    tokens=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 2), st.booleans()), max_size=40),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    presence=st.sampled_from([0.0, 0.8]),
    frequency=st.sampled_from([0.0, -0.4]),
)
def test_penalties_are_those_specified(
    tokens: list[tuple[int, int, bool]], repetition: float, presence: float, frequency: float
) -> None:
    token_ids = torch.tensor([token for token, _, _ in tokens], dtype=torch.int64)
    rows = torch.tensor([row for _, row, _ in tokens], dtype=torch.int32)
    is_output = torch.tensor([flag for _, _, flag in tokens], dtype=torch.bool)
    penalties = [torch.tensor([1.0, value, value]) for value in (repetition,)]
    penalties += [torch.tensor([value, 0.0, value]) for value in (presence, frequency)]
    found = logits_of(3, 60)
    expected = found.clone()
    sampling.penalize(found, token_ids, rows, is_output, *penalties)
    specification.penalize(expected, token_ids, rows, is_output, *penalties)
    torch.testing.assert_close(found, expected)
