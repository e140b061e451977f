"""Triton's kernels that treat rows alone, against the specification."""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import cpu
from kernels import triton as gpu
from tests.kernels.cases import sampled

pytestmark = pytest.mark.usefixtures("poison")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = st.sampled_from([torch.float32, torch.float16])
ROWS = st.integers(0, 9)
HEADS = st.integers(1, 8)
HEAD_DIMS = st.sampled_from([64, 80, 96, 128])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@sampled(12, rows=ROWS, width=st.integers(1, 1300), dtype=DTYPES)
def test_norms_are_those_specified(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    close(gpu.rms_norm(x, weight, 1e-5), cpu.rms_norm(x, weight, 1e-5))
    expected = cpu.add_rms_norm(x, residual, weight, 1e-5)
    for found, wanted in zip(gpu.add_rms_norm(x, residual, weight, 1e-5), expected, strict=True):
        close(found, wanted)


@sampled(12, rows=ROWS, heads=HEADS, head_dim=HEAD_DIMS, dtype=DTYPES)
def test_heads_of_wider_rows_are_normed(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, heads + 3, head_dim, dtype=dtype)[:, 2:-1], random(head_dim, dtype=dtype, seed=1)
    close(gpu.rms_norm(x, weight, 1e-5), cpu.rms_norm(x, weight, 1e-5))


def test_norm_of_half_precision_does_not_overflow() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert gpu.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 8]


@sampled(12, rows=ROWS, groups=HEADS, per_group=st.integers(1, 8), head_dim=HEAD_DIMS, dtype=DTYPES)
def test_rotary_is_that_specified_and_touches_nothing_else(
    rows: int, groups: int, per_group: int, head_dim: int, dtype: torch.dtype
) -> None:
    heads = random(rows, groups * (per_group + 2), head_dim, dtype=dtype)
    before = heads.clone()
    parts = [groups * per_group, groups, groups]
    q, k, v = torch.split(heads, parts, 1)
    old_q, old_k, old_v = torch.split(before, parts, 1)
    positions = torch.arange(rows).flip(0) * 3
    angles = random(40, head_dim // 2, seed=1)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    expected = cpu.rotary(old_q, old_k, positions, cos_sin)
    for found, wanted in zip(gpu.rotary(q, k, positions, cos_sin), expected, strict=True):
        close(found, wanted)
    assert torch.equal(v, old_v)


@sampled(
    24,
    dtype=DTYPES,
    rows=st.integers(0, 20),
    groups=HEADS,
    head_dim=HEAD_DIMS,
    block_size=st.sampled_from([16, 32, 64]),
)
def test_keys_and_values_are_stored_in_their_slots_alone(
    dtype: torch.dtype, rows: int, groups: int, head_dim: int, block_size: int
) -> None:
    heads = random(rows, 2 * groups + 1, head_dim)
    k, v = heads[:, :groups], heads[:, groups + 1 :]
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(rows))[:rows]
    found = torch.full((4, 2, 2, groups, block_size, head_dim), torch.nan, dtype=dtype)
    expected = found.clone()
    gpu.store_kv(k, v, found[:, 1], slots)
    cpu.store_kv(k, v, expected[:, 1], slots)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


@sampled(12, rows=ROWS, width=st.integers(1, 2100), dtype=DTYPES)
def test_the_gate_is_that_specified(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype)
    close(gpu.silu_mul(gate_up), cpu.silu_mul(gate_up))
