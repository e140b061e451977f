"""Blocks on their way out of a cache and into another one."""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import specification
from kernels.triton import blocks
from tests.kernels.cases import sampled

pytestmark = pytest.mark.usefixtures("poison")
NUM_BLOCKS = 7
SHAPE = {"rows": st.integers(1, 150), "head_dim": st.sampled_from([64, 80, 96, 128])}
IDS = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4, unique=True)
DTYPES = st.sampled_from([torch.float32, torch.float16])


def make_cache(rows: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    cache = torch.randn(NUM_BLOCKS, rows, head_dim, generator=torch.Generator().manual_seed(rows)).to(dtype)
    cache[:, 0] = 0  # a row without a scale
    return cache


@sampled(12, **SHAPE, ids=IDS, source=DTYPES, target=DTYPES)
def test_blocks_are_gathered_and_scattered_as_specified(
    rows: int, head_dim: int, ids: list[int], source: torch.dtype, target: torch.dtype
) -> None:
    cache, block_ids = make_cache(rows, head_dim, source), torch.tensor(ids, dtype=torch.int64)
    gathered = blocks.gather_blocks(cache, block_ids, target)
    assert torch.equal(gathered, specification.gather_blocks(cache, block_ids, target))
    found, expected = torch.full_like(cache, torch.nan), torch.full_like(cache, torch.nan)
    blocks.scatter_blocks(gathered, None, block_ids, found)
    specification.scatter_blocks(gathered, None, block_ids, expected)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


@sampled(12, **SHAPE, ids=IDS)
def test_blocks_are_quantized_as_specified(rows: int, head_dim: int, ids: list[int]) -> None:
    cache, block_ids = make_cache(rows, head_dim), torch.tensor(ids, dtype=torch.int64)
    values, scales = blocks.quantize_blocks(cache, block_ids, torch.int8)
    wanted, wanted_scales = specification.quantize_blocks(cache, block_ids, torch.int8)
    torch.testing.assert_close(scales, wanted_scales)
    torch.testing.assert_close(values.float(), wanted.float(), atol=1, rtol=0)  # a tie may go either way
    assert (values == wanted).float().mean() > 0.99 or not ids
    found, expected = torch.full_like(cache, torch.nan), torch.full_like(cache, torch.nan)
    blocks.scatter_blocks(values, scales, block_ids, found)
    specification.scatter_blocks(values, scales, block_ids, expected)
    torch.testing.assert_close(
        found, expected, atol=float(scales.amax()) if ids else 0, rtol=0, equal_nan=True
    )


def test_int8_keeps_what_it_can() -> None:
    cache, block_ids = make_cache(24, 64), torch.tensor([4, 1])
    found = torch.zeros_like(cache)
    blocks.scatter_blocks(*blocks.quantize_blocks(cache, block_ids, torch.int8), block_ids, found)
    largest = cache.abs().amax(-1, keepdim=True)
    assert ((found - cache).abs() <= 1.01 / 254 * largest)[[4, 1]].all()
    assert not found[[0, 2, 3, 5, 6]].any()


@sampled(12, **SHAPE)
def test_float8_keeps_what_it_has_numbers_for(rows: int, head_dim: int) -> None:
    # Other numbers are for a GPU: the interpreter loses the carry when it rounds to this type.
    cache = make_cache(rows, head_dim).mul(64).to(torch.float8_e4m3fn).float()
    cache[:, :, 0] = 448  # the largest number of the type: every scale is a power of two
    cache *= 2.0 ** torch.arange(rows).remainder(5)[:, None]
    block_ids = torch.tensor([5, 2])
    values, scales = blocks.quantize_blocks(cache, block_ids, torch.float8_e4m3fn)
    wanted, wanted_scales = specification.quantize_blocks(cache, block_ids, torch.float8_e4m3fn)
    assert torch.equal(values.float(), wanted.float()) and torch.equal(scales, wanted_scales)
    found = torch.zeros_like(cache)
    blocks.scatter_blocks(values, scales, block_ids, found)
    assert torch.equal(found[block_ids], cache[block_ids])
