"""Drawing in C: the token that is specified, whatever leaves tokens out, for every instruction set."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import native, specification
from tests.kernels.test_native import REASON, isa, relaxed  # noqa: F401 (isa is a fixture)

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def specified(
    row: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float, chance: float
) -> int:
    choices = torch.tensor([[temperature, min_p, top_k, top_p, chance]], dtype=torch.float64)
    return int(specification.draw_each(row[None], choices))


def draw(row: torch.Tensor, *choice: Any) -> int:
    return native.draw([row], [choice])[0]


@relaxed
@given(
    size=st.sampled_from([1, 15, 16, 17, 1000, 5003]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    forbidden=st.booleans(),
    temperature=st.sampled_from([0.2, 0.8, 1.5]),
    min_p=st.sampled_from([0.0, 0.1]),
    top_k=st.sampled_from([0, 1, 7, 10_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.05]),
    chance=st.sampled_from([0.0, 0.1234, 0.5678, 0.9321]),
    seed=st.integers(0, 1000),
)
def test_draws_what_is_specified(
    isa: str,  # noqa: F811
    size: int,
    spread: float,
    forbidden: bool,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    chance: float,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    row = spread * torch.randn(size, generator=g)
    if forbidden:
        row[1::3] = -torch.inf
    options = (temperature, min_p, top_k, top_p)
    found = draw(row, *options, chance)
    near = {specified(row, *options, min(max(chance + step, 0.0), 0.999999)) for step in (-1e-6, 0.0, 1e-6)}
    assert found in near, "beyond what rounding may do at the border of two tokens"


def test_equally_likely_tokens_stay_together(isa: str) -> None:  # noqa: F811
    row = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    drawn = {draw(row, 1.0, 0.0, 2, 1.0, chance / 100) for chance in range(100)}
    assert drawn == {1, 2, 3}


def test_the_highest_chance_still_draws_a_token_that_is_left(isa: str) -> None:  # noqa: F811
    row = torch.full((100,), -torch.inf)
    row[7] = row[23] = 0.0
    assert draw(row, 1.0, 0.0, 0, 1.0, 1 - 2**-53) == 23
    assert draw(row, 1.0, 0.0, 0, 1.0, 0.0) == 7


def test_rows_that_lie_apart_are_drawn_as_each_alone(isa: str) -> None:  # noqa: F811
    g = torch.Generator().manual_seed(5)
    rows = list(torch.randn(40, 3000, generator=g)[::3])
    choices = [(0.5 + i / 10, 0.01 * (i % 2), 50 * (i % 3), 1 - 0.05 * (i % 4), i / 14) for i in range(14)]
    native.set_num_threads(3)
    try:
        together = native.draw(rows, choices)
    finally:
        native.set_num_threads(1)
    assert together == [draw(row, *choice) for row, choice in zip(rows, choices, strict=True)]


ODD = [torch.nan, torch.inf, -torch.inf, 1e9]


@relaxed
@given(
    num_rows=st.integers(1, 5),
    size=st.sampled_from([1, 15, 16, 17, 64, 1024, 1025, 5003]),
    ties=st.booleans(),
    odd=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5002), st.sampled_from(ODD)), max_size=6),
    seed=st.integers(0, 1000),
)
def test_the_best_is_the_one_specified(
    isa: str,  # noqa: F811
    num_rows: int,
    size: int,
    ties: bool,
    odd: list[tuple[int, int, float]],
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, size, generator=g)
    if ties:
        logits = logits.round()
    for row, column, value in odd:
        if row < num_rows and column < size:
            logits[row, column] = value
    found, expected = native.best_each(logits), specification.best_each(logits)
    assert found[0] == expected[0]
    assert torch.equal(torch.tensor(found[1]).nan_to_num(7.5), torch.tensor(expected[1]).nan_to_num(7.5))
