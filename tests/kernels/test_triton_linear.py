"""Products with weights of few bits, against products with what these weights stand for."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import LinearWeight
from kernels.triton.linear import GROUP, Quantization, linear, pack_linear

pytestmark = pytest.mark.usefixtures("poison")
KINDS: list[Quantization] = ["int8", "int4"]


def unpack(packed: LinearWeight) -> Tensor:
    """The weights [O, I] that ``packed`` stands for."""
    data = packed.data[0]
    groups = data.view(packed.out_features, -1, GROUP).float()
    if len(packed.data) == 3:
        pairs = data.view(packed.out_features, -1, 1, GROUP)
        groups = torch.cat([pairs & 15, pairs >> 4], 2).flatten(1, 2).float()
    wide = groups * packed.data[1][..., None]
    if len(packed.data) == 3:
        wide += packed.data[2][..., None]
    return wide.flatten(1)[:, : packed.in_features]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 70),
    num_inputs=st.integers(1, 200),
    num_outputs=st.integers(1, 150),
    kind=st.sampled_from(KINDS),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_a_product_is_that_with_the_unpacked_weights(
    rows: int, num_inputs: int, num_outputs: int, kind: Quantization, has_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    x = torch.randn(rows, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if has_bias else None
    packed = pack_linear(weight, bias, kind)
    expected = F.linear(x.float(), unpack(packed).to(dtype).float(), None if bias is None else bias.float())
    found = linear(x, packed)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=2e-3)


@pytest.mark.parametrize(("kind", "levels"), [("int8", 254), ("int4", 15)])
def test_weights_are_kept_to_half_a_step(kind: Quantization, levels: int) -> None:
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))
    groups = F.pad(weight, (0, 28)).view(40, -1, GROUP)
    spread = 2 * groups.abs().amax(-1) if kind == "int8" else groups.amax(-1) - groups.amin(-1)
    steps = (spread / levels).repeat_interleave(GROUP, 1)[:, :100]
    error = (unpack(pack_linear(weight, None, kind)) - weight).abs()
    assert (error <= 0.51 * steps + 2e-3).all()  # scales and offsets are rounded to half precision


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_all_equal_or_zero_have_no_scale_to_divide_by(kind: Quantization) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    torch.testing.assert_close(unpack(pack_linear(weight, None, kind)), weight, atol=3e-4, rtol=0)


def test_weights_in_their_own_type_are_left_as_they_are() -> None:
    weight, x = torch.randn(5, 7), torch.randn(3, 7)
    torch.testing.assert_close(linear(x, pack_linear(weight, None)), x @ weight.T)
