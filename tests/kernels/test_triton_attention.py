"""Triton's attention against the specification, and where it must not look."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import strategies as st

from benchmarks.gpu.steps import Shape, Step, make_step
from kernels import cpu
from kernels.triton import decode
from kernels.triton.attention import paged_attention
from tests.kernels.cases import sampled

SCALE = 0.2
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
SMALL = Shape(2, 3, 80, 16, torch.float32)
SHAPES = st.builds(
    Shape,
    num_groups=st.sampled_from([1, 2]),
    heads_per_group=st.integers(1, 8),
    head_dim=st.sampled_from([64, 80, 96, 128]),
    block_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
QUERIES = st.one_of(st.integers(0, 8), st.integers(9, 70))
SEQUENCES = st.lists(st.tuples(QUERIES, st.integers(0, 90)), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def _few_parts(poison: None) -> Iterator[None]:
    """Interpreted programs are slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "PROGRAMS", 8)
        yield


def check(step: Step, window: int) -> None:
    found = paged_attention(step.q, step.cache, step.batch, SCALE, window)
    assert found.dtype == step.q.dtype
    wide = step.wide()
    expected = cpu.paged_attention(wide.q, wide.cache, wide.batch, SCALE, window)
    tolerance = TOLERANCE[step.q.dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@sampled(25, queries=SEQUENCES, shape=SHAPES, window=st.sampled_from([0, 0, 1, 20]))
def test_gives_what_is_specified(queries: list[tuple[int, int]], shape: Shape, window: int) -> None:
    check(make_step([(count, count + earlier) for count, earlier in queries], shape), window)


def test_poison_is_in_every_new_tensor() -> None:
    assert torch.empty(3).isnan().all() and torch.zeros(1).new_empty(3).isnan().all()


def test_one_token_alone_sees_itself() -> None:
    step = make_step([(1, 1)], SMALL)
    found = paged_attention(step.q, step.cache, step.batch, SCALE, 0)
    value = step.cache[step.batch.block_tables[0, 0], 1, :, 0]  # [G, D]
    torch.testing.assert_close(found[0], value.repeat_interleave(3, 0))


def test_a_step_without_sequences_has_an_empty_result() -> None:
    step = make_step([(0, 5)], SMALL)
    assert paged_attention(step.q, step.cache, step.batch, SCALE, 0).shape == (0, 6, 80)


@pytest.mark.parametrize("num_queries", [1, 4])
def test_a_long_context_is_put_together_from_its_parts(
    num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "PROGRAMS", 64)
    shape = Shape(2, 3, 64, 16, torch.float32)
    assert decode.num_parts(2, 2) == 16
    check(make_step([(num_queries, 700), (num_queries, num_queries)], shape), 0)


def test_many_sequences_get_one_part_each_and_few_get_many() -> None:
    assert [decode.num_parts(count, 8) for count in (1, 256)] == [1, 1]  # of 8 programs, as set here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "PROGRAMS", 256)
        assert [decode.num_parts(count, 8) for count in (1, 2, 3, 8, 32, 256)] == [32, 16, 8, 4, 1, 1]


def test_a_cache_of_another_type_is_read() -> None:
    step = make_step([(1, 40), (20, 33)], SMALL)
    check(step._replace(cache=step.cache.half().float()), 0)
    narrow = step._replace(cache=step.cache.half())
    found = paged_attention(narrow.q, narrow.cache, narrow.batch, SCALE, 0)
    expected = cpu.paged_attention(narrow.q, narrow.cache.float(), narrow.batch, SCALE, 0)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_sequences_do_not_see_each_other() -> None:
    together = make_step([(1, 30), (12, 40), (2, 9)], SMALL)
    found = paged_attention(together.q, together.cache, together.batch, SCALE, 0)
    other = together.cache.clone()
    other[together.batch.block_tables[1, :3].long()] = 1e4
    changed = paged_attention(together.q, other, together.batch, SCALE, 0)
    assert torch.equal(found[:1], changed[:1]) and torch.equal(found[13:], changed[13:])
    assert not torch.equal(found[1:13], changed[1:13])
