"""The PyTorch operations against their formulas, written out one number at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import AttentionBatch, cpu

HEADS, GROUPS, HEAD_DIM = 6, 2, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Sequences of given (queries, tokens), their keys and values scattered over a cache whose blocks are
    strided as those of one layer among several are, and full of NaN wherever no token is."""

    def __init__(self, sequences: list[tuple[int, int]], block_size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_blocks = sum(-(-tokens // block_size) for _, tokens in sequences) + 3
        whole = torch.full((num_blocks, 3, 2, GROUPS, block_size, HEAD_DIM), torch.nan)
        self.cache = whole[:, 1]
        free = torch.randperm(num_blocks, generator=generator).tolist()
        longest = max(-(-tokens // block_size) for _, tokens in sequences)
        tables = torch.zeros(len(sequences), longest, dtype=torch.int32)
        self.keys, self.values, slots, positions = [], [], [], []
        for index, (queries, tokens) in enumerate(sequences):
            blocks = [free.pop() for _ in range(-(-tokens // block_size))]
            tables[index, : len(blocks)] = torch.tensor(blocks)
            at = torch.arange(tokens)
            places = torch.tensor(blocks)[at // block_size] * block_size + at % block_size
            self.keys.append(torch.randn(tokens, GROUPS, HEAD_DIM, generator=generator))
            self.values.append(torch.randn(tokens, GROUPS, HEAD_DIM, generator=generator))
            cpu.store_kv(self.keys[-1], self.values[-1], self.cache, places)
            slots.append(places[tokens - queries :])
            positions.append(at[tokens - queries :])
        starts = [0, *torch.tensor([queries for queries, _ in sequences]).cumsum(0).tolist()]
        self.batch = AttentionBatch(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([tokens for _, tokens in sequences], dtype=torch.int32),
            block_tables=tables,
            slots=torch.cat(slots),
            positions=torch.cat(positions),
            max_query_len=max(queries for queries, _ in sequences),
            max_context_len=max(tokens for _, tokens in sequences),
        )
        self.queries = torch.randn(starts[-1], HEADS, HEAD_DIM, generator=generator)
        self.owners = [(index, row) for index, (queries, _) in enumerate(sequences) for row in range(queries)]

    def expected(self, scale: float, window: int) -> Tensor:
        """Attention as the definition has it: one query, one head at a time."""
        out = torch.zeros_like(self.queries)
        for row, (sequence, _) in enumerate(self.owners):
            position = int(self.batch.positions[row])
            first = max(0, position + 1 - window) if window else 0
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                keys = self.keys[sequence][first : position + 1, group]
                weights = torch.softmax(keys @ self.queries[row, head] * scale, 0)
                out[row, head] = weights @ self.values[sequence][first : position + 1, group]
        return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 7, 16]),
)
def test_attention_follows_its_definition(
    lengths: list[tuple[int, int]], block_size: int, window: int
) -> None:
    case = Case([(queries, queries + earlier) for queries, earlier in lengths], block_size)
    found = cpu.paged_attention(case.queries, case.cache, case.batch, 0.3, window)
    torch.testing.assert_close(found, case.expected(0.3, window), atol=1e-5, rtol=1e-5)


def test_many_short_sequences_with_one_query_each_are_told_apart() -> None:
    case = Case([(1, 1 + index % 37) for index in range(70)], block_size=16)
    found = cpu.paged_attention(case.queries, case.cache, case.batch, 0.3, 0)
    torch.testing.assert_close(found, case.expected(0.3, 0), atol=1e-5, rtol=1e-5)


def test_queries_and_values_may_be_slices_of_wider_rows() -> None:
    case = Case([(4, 9)], block_size=4)
    rows = torch.zeros(4, HEADS + 2, HEAD_DIM)
    rows[:, :HEADS] = case.queries
    found = cpu.paged_attention(rows[:, :HEADS], case.cache, case.batch, 0.3, 0)
    torch.testing.assert_close(found, case.expected(0.3, 0), atol=1e-5, rtol=1e-5)


def test_a_cache_of_another_type_is_read_and_written() -> None:
    case = Case([(3, 20)], block_size=4)
    narrow = case.cache.to(torch.bfloat16)
    cpu.store_kv(case.keys[0][-3:], case.values[0][-3:], narrow, case.batch.slots)
    found = cpu.paged_attention(case.queries, narrow, case.batch, 0.3, 0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, case.expected(0.3, 0), atol=0.05, rtol=0)


def test_storing_touches_the_given_slots_only() -> None:
    cache = torch.zeros(5, 2, GROUPS, 4, HEAD_DIM)
    k, v = random(3, GROUPS, HEAD_DIM), random(3, GROUPS, HEAD_DIM, seed=1)
    slots = torch.tensor([2, 19, 9])  # (block 0, offset 2), (4, 3), (2, 1)
    cpu.store_kv(k, v, cache, slots)
    for row, (block, offset) in enumerate([(0, 2), (4, 3), (2, 1)]):
        assert torch.equal(cache[block, 0, :, offset], k[row])
        assert torch.equal(cache[block, 1, :, offset], v[row])
        cache[block, :, :, offset] = 0
    assert not cache.any()


def test_linear_multiplies_and_adds_the_bias() -> None:
    x, weight, bias = random(3, 5), random(4, 5, seed=1), random(4, seed=2)
    found = cpu.linear(x, cpu.pack_linear(weight, bias))
    for row in range(3):
        for out in range(4):
            expected = math.fsum((x[row] * weight[out]).tolist()) + float(bias[out])
            assert float(found[row, out]) == pytest.approx(expected, abs=1e-5)


def test_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = random(2, 16), random(16, seed=1)
    found = cpu.rms_norm(x, weight, 0.01)
    for row in range(2):
        root = math.sqrt(math.fsum(value**2 for value in x[row].tolist()) / 16 + 0.01)
        torch.testing.assert_close(found[row], x[row] / root * weight)


def test_norm_of_a_sum_returns_the_sum_as_well() -> None:
    x, residual, weight = random(2, 16), random(2, 16, seed=1), random(16, seed=2)
    normed, total = cpu.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, cpu.rms_norm(x + residual, weight, 1e-5))


def test_norm_of_half_precision_does_not_overflow() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)  # 300 squared is infinite in float16
    assert cpu.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 8]


def test_rotary_turns_each_pair_by_its_angle() -> None:
    q, k = random(3, HEADS, HEAD_DIM), random(3, GROUPS, HEAD_DIM, seed=1)
    angles = random(10, HEAD_DIM // 2, seed=2)
    positions = torch.tensor([7, 0, 9])
    turned = cpu.rotary(q, k, positions, torch.cat([angles.cos(), angles.sin()], dim=1))
    half = HEAD_DIM // 2
    for found, x in zip(turned, (q, k), strict=True):
        numbers = torch.complex(x[..., :half], x[..., half:])
        expected = numbers * torch.polar(torch.ones(3, half), angles[positions])[:, None]
        torch.testing.assert_close(found, torch.cat([expected.real, expected.imag], dim=-1))


def test_embedding_takes_rows() -> None:
    table = random(6, 4)
    assert torch.equal(cpu.embedding(torch.tensor([5, 0, 5]), table), table[[5, 0, 5]])


def test_gate_is_the_first_half() -> None:
    gate_up = random(2, 8)
    gate, up = gate_up[:, :4], gate_up[:, 4:]
    torch.testing.assert_close(cpu.silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)
