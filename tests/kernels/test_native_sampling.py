"""Drawing in C: the token that is specified, whatever leaves tokens out, for every instruction set."""

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
    found = native.draw(row, *options, chance)
    near = {specified(row, *options, min(max(chance + step, 0.0), 0.999999)) for step in (-1e-6, 0.0, 1e-6)}
    assert found in near, "beyond what rounding may do at the border of two tokens"


def test_equally_likely_tokens_stay_together(isa: str) -> None:  # noqa: F811
    row = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    drawn = {native.draw(row, 1.0, 0.0, 2, 1.0, chance / 100) for chance in range(100)}
    assert drawn == {1, 2, 3}


def test_the_highest_chance_still_draws_a_token_that_is_left(isa: str) -> None:  # noqa: F811
    row = torch.full((100,), -torch.inf)
    row[7] = row[23] = 0.0
    assert native.draw(row, 1.0, 0.0, 0, 1.0, 1 - 2**-53) == 23
    assert native.draw(row, 1.0, 0.0, 0, 1.0, 0.0) == 7
