"""Products with weights of few bits, against the specification."""

import pytest
import torch
from hypothesis import strategies as st

from kernels import cpu
from kernels.quantization import BLOCK_BYTES, BlockFormat, BlockWeight, Quantization
from kernels.triton.linear import linear, pack_linear
from tests.kernels.cases import sampled

pytestmark = pytest.mark.usefixtures("poison")
KINDS: list[Quantization] = ["int8", "int4"]


@sampled(
    30,
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
    wide_bias = None if bias is None else bias.float()
    found = linear(x, pack_linear(weight, bias, kind))
    rounded = cpu.pack_linear(weight, None, kind).data[0].float()
    expected = cpu.linear(x.float(), cpu.pack_linear(rounded, wide_bias))
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=2e-3)


@pytest.mark.parametrize("block_format", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_blocks_of_a_file_are_taken_as_they_are(block_format: BlockFormat, num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(num_blocks)
    shape = (70, num_blocks, BLOCK_BYTES[block_format])
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    num_halves = 2 if block_format == "Q4_1" else 1
    halves = torch.randn(*shape[:2], num_halves, generator=generator).mul(0.1).half()
    blocks[..., : 2 * num_halves] = halves.view(torch.uint8)
    weight = BlockWeight(blocks.flatten(1), block_format, torch.float32)
    x = torch.randn(3, 32 * num_blocks, generator=generator)
    expected = cpu.linear(x, cpu.pack_linear(weight, None))
    torch.testing.assert_close(linear(x, pack_linear(weight, None)), expected, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_all_equal_or_zero_have_no_scale_to_divide_by(kind: Quantization) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    found = linear(torch.eye(64), pack_linear(weight, None, kind))
    torch.testing.assert_close(found.T, weight, atol=5e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_too_large_for_their_scales_are_refused(kind: Quantization) -> None:
    with pytest.raises(ValueError, match=f"cannot be kept as {kind}"):
        pack_linear(torch.full((2, 32), 300.0), None, kind)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_results_come_in_the_type_asked_for(kind: Quantization | None) -> None:
    weight, x = torch.randn(5, 64).half(), torch.randn(3, 64).half()
    found = linear(x, pack_linear(weight, None, kind), torch.float32)
    assert found.dtype == torch.float32
    expected = cpu.linear(x, cpu.pack_linear(weight, None, kind), torch.float32)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-3)
