"""What whole numbers stand for: the blocks of GGUF files as their own library reads them, and rounding."""

import gguf
import pytest
import torch

from kernels import cpu, native
from kernels.quantization import BLOCK_BYTES, BlockFormat, BlockWeight, Quantization, on_grid

FORMATS: list[BlockFormat] = list(BLOCK_BYTES)
KINDS: list[Quantization] = ["int8", "int4"]


def blocks(block_format: BlockFormat, scale: float = 1.0) -> tuple[BlockWeight, torch.Tensor]:
    """Of a [70, 96] matrix: three blocks a row, so that the last span is half empty; and its values."""
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(5)) * scale
    kind = gguf.GGMLQuantizationType[block_format]
    rows = gguf.quantize(weight.numpy(), kind)
    values = torch.from_numpy(gguf.dequantize(rows, kind))
    return BlockWeight(torch.from_numpy(rows), block_format, torch.float32), values


@pytest.mark.parametrize("block_format", FORMATS)
def test_blocks_have_the_values_that_the_gguf_library_reads(block_format: BlockFormat) -> None:
    weight, expected = blocks(block_format)
    assert weight.shape == (70, 96)
    torch.testing.assert_close(weight.values(), expected, atol=1e-6, rtol=0)
    assert expected.abs().max() <= weight.largest() < 3 * expected.abs().max()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Tiles take weights rounded to bfloat16, on the way in half precision."""
    tolerance = 2**-7 if native.instruction_set() == "amx" else 2e-5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, check_stride=False)


@pytest.mark.parametrize("block_format", ["Q4_0", "Q4_1"])
def test_the_kernels_in_c_take_blocks_of_four_bits_as_they_are(block_format: BlockFormat) -> None:
    if reason := native.available():
        pytest.skip(reason)
    weight, _ = blocks(block_format)
    x = torch.eye(96)  # one weight for each result: of activations nothing is lost
    found = native.linear(x, native.pack_linear(weight, None))
    expected = cpu.linear(x, cpu.pack_linear(weight, None))
    close(found, expected)


def test_the_kernels_in_c_take_blocks_of_eight_bits_for_the_weights_that_they_hold() -> None:
    if reason := native.available():
        pytest.skip(reason)
    weight, values = blocks("Q8_0")
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(8))
    found = native.linear(x, native.pack_linear(weight, None))
    assert torch.equal(found, native.linear(x, native.pack_linear(values, None, "int8")))


def test_the_kernels_in_c_round_to_four_bits_as_it_is_specified() -> None:
    if reason := native.available():
        pytest.skip(reason)
    weight = torch.randn(70, 80, generator=torch.Generator().manual_seed(6))
    x = torch.eye(80)
    found = native.linear(x, native.pack_linear(weight, None, "int4"))
    close(found, on_grid(weight, "int4").T)


@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("int4", 15)])
def test_rounding_keeps_extremes_and_is_off_by_half_a_step_at_most(kind: Quantization, steps: int) -> None:
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(7))
    rounded = on_grid(weight, kind)
    groups, found = weight.view(9, 2, 32), rounded.view(9, 2, 32)
    if kind == "int8":
        step = 2 * groups.abs().amax(-1) / steps
    else:
        step = (groups.amax(-1) - groups.amin(-1)) / steps
        assert all(len(set(group.tolist())) <= 16 for group in found.flatten(0, 1))
    assert ((groups - found).abs().amax(-1) <= 0.51 * step).all()


def test_zeros_stay_zeros() -> None:
    assert all(torch.equal(on_grid(torch.zeros(2, 40), kind), torch.zeros(2, 40)) for kind in KINDS)


@pytest.mark.parametrize("ops", [cpu, native], ids=["PyTorch", "C"])
def test_weights_too_large_to_keep_are_refused(ops: object) -> None:
    if ops is native and (reason := native.available()):
        pytest.skip(reason)
    kernels = native if ops is native else cpu
    with pytest.raises(ValueError, match=r"weights of up to 1e\+03 cannot be kept as int4"):
        kernels.pack_linear(torch.full((64, 64), 1000.0), None, "int4")
    with pytest.raises(ValueError, match="cannot be kept as int4"):
        kernels.pack_linear(blocks("Q4_1", scale=300.0)[0], None)
    with pytest.raises(ValueError, match="weights of up to inf cannot be kept as int8"):
        kernels.pack_linear(torch.full((64, 64), float("inf")), None, "int8")
