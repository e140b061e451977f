"""A cache of whole numbers: what is stored, what attention makes of it, and how much of it is lost."""

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch, cpu, native
from tests.kernels.test_native import REASON, close, isa, same_bits  # noqa: F401 (isa is a fixture)

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

HEADS, GROUPS, BLOCK, NUM_BLOCKS = 6, 2, 16, 30


def empty_cache(head_dim: int) -> Tensor:
    """What was never written: scales that are no numbers."""
    return torch.full((NUM_BLOCKS, 2, GROUPS, BLOCK, head_dim + 4), -1, dtype=torch.int8)


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(length: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two caches, in whole numbers and as they are, and a table of blocks [blocks] and slots [length]."""
    k, v = (random(length, GROUPS, head_dim, dtype=dtype, seed=seed) * 3 for seed in (1, 2))
    table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(length)
    slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
    cache = empty_cache(head_dim)
    plain = torch.full((NUM_BLOCKS, 2, GROUPS, BLOCK, head_dim), torch.nan)
    cpu.store_kv(k, v, cache, slots)
    cpu.store_kv(k.float(), v.float(), plain, slots)
    return cache, plain, table, slots


@pytest.mark.parametrize("head_dim", [32, 64, 40, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bytes_are_stored(isa: str, dtype: torch.dtype, head_dim: int) -> None:  # noqa: F811
    k, v = (random(70, GROUPS, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    k[3] = 0
    slots = torch.randperm(NUM_BLOCKS * BLOCK, generator=torch.Generator().manual_seed(3))[:70]
    expected, found = empty_cache(head_dim), empty_cache(head_dim)
    cpu.store_kv(k, v, expected, slots)
    native.store_kv(k, v, found, slots)
    assert same_bits(found, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("ops", [cpu, native], ids=["PyTorch", "C"])
def test_numbers_that_are_none_are_not_hidden(ops: object, bad: float) -> None:
    cache = empty_cache(32)
    k = torch.ones(2, GROUPS, 32)
    k[1, 0, 5] = bad
    (native if ops is native else cpu).store_kv(k, torch.ones_like(k), cache, torch.tensor([0, 1]))
    keys = cpu.from_cached(cache[0, 0, 0], torch.float32)
    assert keys[0].isfinite().all() and not keys[1].isfinite().any()


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 130), (3, 64), (90, 90), (50, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 40])
def test_attention_is_what_is_specified(
    isa: str,  # noqa: F811
    dtype: torch.dtype,
    queries: int,
    length: int,
    window: int,
    head_dim: int,
) -> None:
    cache, plain, table, slots = filled(length, head_dim, dtype)
    q = random(queries, HEADS, head_dim, dtype=dtype, seed=4)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, queries], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=table[None].int(),
        slots=slots[-queries:],
        positions=torch.arange(length - queries, length),
        max_query_len=queries,
        max_context_len=length,
    )
    found = native.paged_attention(q, cache, batch, head_dim**-0.5, window)
    expected = cpu.paged_attention(q.float(), cache, batch, head_dim**-0.5, window)
    close(found, expected, 2e-5 if dtype == torch.float32 else 2e-2)
    exact = cpu.paged_attention(q.float(), plain, batch, head_dim**-0.5, window)
    close(expected, exact, 5e-2)
