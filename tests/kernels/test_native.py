"""The C kernels against the PyTorch ones, for every instruction set of this processor, and bit against bit
with themselves: what is in a batch beside a row, how it is cut and who computes it must not show in the
row."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from threading import Event

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import AttentionBatch, cpu, native
from kernels.memory import round_up
from kernels.native.build import BuildError
from kernels.quantization import Quantization

REASON = native.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
QUANTIZED_TOLERANCE = {"int8": 3e-2, "int4": 4e-2}  # int4: of weights on its own grid
relaxed = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


def instruction_sets() -> list[str]:
    if REASON is not None:
        return []
    present = []
    for name in ("amx", "avx512_bf16", "avx512", "avx2", "portable"):
        try:
            present.append(native.instruction_set(name))
        except BuildError:
            continue
    native.instruction_set("")
    return present


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield native.instruction_set(request.param)
    native.instruction_set("")


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    native.set_num_threads(1)


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float, scale_at_least: float = 1e-3) -> None:
    """``scale_at_least``: what results are usually as large as, where these may have cancelled out."""
    assert actual.shape == expected.shape
    scale = expected.float().abs().max().clamp_min(scale_at_least)
    difference = (actual.float() - expected.float()).abs().max()
    assert difference <= tolerance * scale, f"off by {difference / scale:.2e} of the largest value"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


# ---- linear ----


@relaxed
@given(
    rows=st.integers(1, 70),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_linear_agrees(
    isa: str, rows: int, inputs: int, outputs: int, dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    x, weight = random(g, rows, inputs, dtype=dtype), random(g, outputs, inputs, dtype=dtype)
    bias = random(g, outputs, dtype=dtype) if with_bias else None
    packed = native.pack_linear(weight, bias)
    assert (packed.in_features, packed.out_features) == (inputs, outputs)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    close(native.linear(x, packed), expected, TOLERANCE[dtype], math.sqrt(inputs))


def on_grid(weight: Tensor, kind: Quantization) -> Tensor:
    """``weight`` as a Q4_1 file would give it back; for int8 as it is."""
    if kind == "int8":
        return weight
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)
    least = padded.amin(-1, keepdim=True).half().float()
    scale = ((padded.amax(-1, keepdim=True) - least) / 15).half().float().clamp_min(1e-4)
    numbers = ((padded - least) / scale).round().clamp(0, 15)
    return torch.flatten(least + scale * numbers, 1)[:, : weight.shape[1]].to(weight.dtype)


@relaxed
@given(
    rows=st.integers(1, 70),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["int8", "int4"]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_quantized_linear_agrees(
    isa: str,
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    kind: Quantization,
    with_bias: bool,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    x, weight = random(g, rows, inputs, dtype=dtype), on_grid(random(g, outputs, inputs, dtype=dtype), kind)
    bias = random(g, outputs, dtype=dtype) if with_bias else None
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    ours = native.linear(x, native.pack_linear(weight, bias, kind))
    close(ours, expected, QUANTIZED_TOLERANCE[kind], math.sqrt(inputs))


def signs(count: int) -> Tensor:
    """Of 512 inputs, repeated: -1 where a bit drawn at random is set."""
    draw = Random(4)
    words = [draw.getrandbits(32) for _ in range(16)]
    return torch.tensor([1.0 - 2.0 * (words[i // 32 % 16] >> i % 32 & 1) for i in range(count)])


def walsh(x: Tensor) -> Tensor:
    """Every run of ``x`` [R, I] of as many as the largest power of two in I times a matrix of Hadamard."""
    run = x.shape[1] & -x.shape[1]
    matrix = torch.ones(1, 1)
    while len(matrix) < run:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.view(len(x), -1, run) @ matrix).flatten(1)


def turned(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 64))
    return walsh(padded * signs(padded.shape[1]))


def in_whole_numbers(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The turned rows as whole numbers, and their scales [R, 1], for every 192 inputs."""
    groups = torch.split(turned(x), 192, dim=1)
    most = [group.abs().amax(1, keepdim=True) for group in groups]
    inverse = [torch.where(each > 0, torch.full_like(each, 127) / each, 0) for each in most]
    numbers = [(group * factor).round() for group, factor in zip(groups, inverse, strict=True)]
    return [each.double() for each in numbers], [each.double() / 127 for each in most]


def product_in_whole_numbers(x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for a, a_scale, w, w_scale in zip(*in_whole_numbers(x), *in_whole_numbers(weight), strict=True):
        total += (a @ w.T) * a_scale * w_scale.T
    padded = round_up(x.shape[1], 64)
    return total / (padded & -padded)


@pytest.mark.parametrize("inputs", [1, 64, 100, 192, 576, 640, 1536])
def test_int8_linear_is_that_of_turned_rows_in_whole_numbers(isa: str, inputs: int) -> None:
    """Of small whole numbers, which turning leaves exact; one input is far larger than all others. Tiles take
    activations as bfloat16."""
    g = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randint(-20, 21, (rows, inputs), generator=g).float() for rows in (37, 70))
    x[:, inputs // 2] *= 100
    found = native.linear(x, native.pack_linear(weight, None, "int8"))
    if isa == "amx":
        close(found, x @ weight.T, 1.5e-2)
    else:
        close(found, product_in_whole_numbers(x, weight).float(), 2e-6)


def test_int8_linear_does_not_saturate(isa: str) -> None:
    """What is turned into the most extreme of whole numbers, all of one sign or of both."""
    extremes = 127 * torch.tensor([[1.0, -1.0, 1.0, -1.0] * 48, [1.0] * 192, [-1.0] * 192])
    rows = walsh(extremes) * signs(192) / 64
    assert torch.equal(turned(rows), extremes)
    found = native.linear(rows, native.pack_linear(rows, None, "int8"))
    close(found, rows @ rows.T, 4e-3 if isa == "amx" else 1e-6)


def test_int8_linear_loses_little_to_an_input_that_stands_out(isa: str) -> None:
    g = torch.Generator().manual_seed(4)
    x, weight = random(g, 16, 576), random(g, 64, 576)
    x[:, 100] = 300.0
    expected = x @ weight.T
    found = native.linear(x, native.pack_linear(weight, None, "int8"))
    assert (found - expected).norm() < 0.015 * expected.norm()


@pytest.mark.parametrize("kind", ["int8", "int4"], ids=str)
def test_numbers_next_to_nothing_count_as_nothing(isa: str, kind: Quantization) -> None:
    weight = torch.ones(3, 64)
    found = native.linear(torch.full((2, 64), 1e-38), native.pack_linear(weight, None, kind))
    assert found.abs().max() < 1e-35
    if kind == "int8":
        tiny = native.pack_linear(weight * 2e-39, None, kind)
        products = native.linear(torch.full((2, 64), 1e30), tiny)
        assert (products >= 0).all() and products.max() < 2e-7


@pytest.mark.parametrize("inputs", [576, 2048])
def test_int8_linear_loses_little_to_what_inputs_have_in_common(isa: str, inputs: int) -> None:
    g = torch.Generator().manual_seed(5)
    for alike, other in [(3.0, 0.0), (0.0, 3.0), (1.0, 1.0)]:
        x, weight = random(g, 16, inputs) + alike, random(g, 64, inputs) + other
        found = native.linear(x, native.pack_linear(weight, None, "int8"))
        lost = found - x @ weight.T
        assert lost.norm() < 0.015 * (x.norm() * weight.norm() / inputs**0.5)


def test_int4_linear_is_exact_for_numbers_on_its_grid(isa: str) -> None:
    numbers = torch.arange(16.0).repeat(10)
    x = torch.tensor([[127.0, -127.0, 64.0, -1.0] * 40, [127.0] * 160, [1.0] + [0.0] * 159])
    weight = torch.stack([numbers - 8, numbers.flip(0) / 8, numbers - 15, numbers * 0 + 3])
    out = native.linear(x, native.pack_linear(weight, None, "int4"))
    close(out, x @ weight.T, 1e-6)


def test_weights_too_large_to_quantize_are_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="1e\\+03 cannot be kept as int4"):
        native.pack_linear(torch.full((64, 64), 1000.0), None, "int4")
    with pytest.raises(ValueError, match="cannot be kept as int8"):
        native.pack_linear(torch.full((64, 64), float("inf")), None, "int8")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["int8", "int4"], ids=str)
def test_quantized_linear_shows_numbers_that_are_none(isa: str, bad: float, kind: Quantization) -> None:
    x = torch.randn(2, 64)
    x[1, 7] = bad
    out = native.linear(x, native.pack_linear(torch.randn(64, 64), None, kind))
    assert out[0].isfinite().all() and not out[1].isfinite().any()


@pytest.mark.parametrize("kind", [None, "int8", "int4"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_linear_does_not_depend_on_the_others(
    isa: str, dtype: torch.dtype, kind: Quantization | None, threads: None
) -> None:
    g = torch.Generator().manual_seed(1)
    for inputs, outputs in [(576, 192), (129, 100), (1536, 64)]:
        packed = native.pack_linear(random(g, outputs, inputs, dtype=dtype), None, kind)
        x = random(g, 600, inputs, dtype=dtype)
        whole = native.linear(x, packed)
        for start, stop in [(0, 1), (3, 5), (7, 20), (100, 117), (9, 41), (11, 60), (599, 600), (0, 512)]:
            assert same_bits(native.linear(x[start:stop].contiguous(), packed), whole[start:stop])
        for count in (2, 3):
            native.set_num_threads(count)
            assert same_bits(native.linear(x, packed), whole)
            assert same_bits(native.linear(x[5:6].contiguous(), packed), whole[5:6])
        native.set_num_threads(1)


# ---- rows ----


@relaxed
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_norms_agree(isa: str, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, residual, weight = (random(g, n, width, dtype=dtype) for n in (rows, rows, 1))
    close(native.rms_norm(x, weight[0], 1e-5), cpu.rms_norm(x, weight[0], 1e-5), TOLERANCE[dtype])
    normed, total = native.add_rms_norm(x, residual, weight[0], 1e-5)
    expected_normed, expected_total = cpu.add_rms_norm(x, residual, weight[0], 1e-5)
    assert same_bits(total, expected_total)
    close(normed, expected_normed, TOLERANCE[dtype])


@relaxed
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_silu_mul_agrees(isa: str, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    x = random(torch.Generator().manual_seed(seed), rows, 2 * width, dtype=dtype) * 4
    close(native.silu_mul(x), cpu.silu_mul(x), TOLERANCE[dtype])


def test_silu_mul_survives_extremes(isa: str) -> None:
    gate = torch.tensor([0.0, -0.0, 200.0, -200.0, 1e30, -1e30, float("nan")])
    out = native.silu_mul(torch.cat([gate, torch.ones(7)]).unsqueeze(0))[0]
    assert out[:6].tolist() == pytest.approx([0, 0, 200.0, 0, 1e30, 0], rel=1e-6, abs=1e-6)
    assert out[6].isnan()


@relaxed
@given(
    rows=st.integers(1, 40),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_rotary_agrees(isa: str, rows: int, heads: int, half: int, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    angles = random(g, 50, half)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(0, 50, (rows,), generator=g)
    both = random(g, rows, heads + 2, 2 * half, dtype=dtype)
    q, k = both[:, :heads], both[:, heads:]  # rows apart, as slices of one projection are
    for actual, expected in zip(
        native.rotary(q, k, positions, table), cpu.rotary(q, k, positions, table), strict=True
    ):
        close(actual, expected, TOLERANCE[dtype])


@relaxed
@given(
    rows=st.integers(1, 30),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 70),
    block_size=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    cache_dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_store_kv_writes_the_slots_and_nothing_else(
    isa: str,
    rows: int,
    heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    k, v = (random(g, rows, heads, head_dim, dtype=dtype) for _ in range(2))
    num_blocks = rows // block_size + 3
    slots = torch.randperm(num_blocks * block_size, generator=g)[:rows]
    layers = random(g, num_blocks, 3, 2, heads, block_size, head_dim, dtype=cache_dtype)
    expected = layers.clone()
    native.store_kv(k, v, layers[:, 1], slots)
    cpu.store_kv(k, v, expected[:, 1], slots)
    assert same_bits(layers, expected)


# ---- attention ----


class Context:
    """Sequences in a cache whose unused places are NaN, at blocks in no order, one layer of several."""

    def __init__(
        self,
        seed: int,
        lens: list[int],
        heads: int = 6,
        groups: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.lens = lens
        num_blocks = [-(-n // block_size) for n in lens]
        order = torch.randperm(sum(num_blocks) + 2, generator=g).tolist()
        self.tables = torch.zeros(len(lens), max(num_blocks) + 1, dtype=torch.int32)
        self.cache = torch.full(
            (len(order), 3, 2, groups, block_size, head_dim), float("nan"), dtype=cache_dtype or dtype
        )[:, 1]
        self.block_size, self.scale = block_size, head_dim**-0.5
        self.q = [random(g, n, heads, head_dim, dtype=dtype) for n in lens]
        for s, n in enumerate(lens):
            blocks = [order.pop() for _ in range(num_blocks[s])]
            self.tables[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            slots = self.slots(s, n)
            k, v = (random(g, n, groups, head_dim, dtype=dtype) for _ in range(2))
            cpu.store_kv(k, v, self.cache, slots)

    def slots(self, s: int, n: int) -> Tensor:
        positions = torch.arange(n)
        return (
            self.tables[s].long()[positions // self.block_size] * self.block_size
            + positions % self.block_size
        )

    def batch(self, parts: list[tuple[int, int, int]]) -> tuple[Tensor, AttentionBatch]:
        """Queries and batch of ``parts``: (sequence, first position, number of positions)."""
        counts = torch.tensor([0] + [count for _, _, count in parts])
        q = torch.cat([self.q[s][start : start + count] for s, start, count in parts])
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])
        return q, AttentionBatch(
            query_starts=counts.cumsum(0).int(),
            context_lens=torch.tensor([start + count for _, start, count in parts], dtype=torch.int32),
            block_tables=self.tables[[s for s, _, _ in parts]],
            slots=torch.zeros_like(positions),
            positions=positions,
            max_query_len=int(counts.max()),
            max_context_len=max(start + count for _, start, count in parts),
        )

    def attend(self, parts: list[tuple[int, int, int]], window: int = 0) -> Tensor:
        q, batch = self.batch(parts)
        return native.paged_attention(q, self.cache, batch, self.scale, window)

    def expect(self, parts: list[tuple[int, int, int]], window: int = 0) -> Tensor:
        q, batch = self.batch(parts)
        return cpu.paged_attention(q.float(), self.cache.float(), batch, self.scale, window)


@settings(relaxed, max_examples=40)
@given(
    lens=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    group=st.integers(1, 9),
    groups=st.integers(1, 3),
    head_dim=st.sampled_from([1, 8, 20, 32, 64, 80, 128]),
    block_size=st.sampled_from([1, 7, 16, 32]),
    dtype=st.sampled_from(DTYPES),
    cache_dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 0, 1, 5, 64, 100]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_attention_agrees(
    isa: str,
    lens: list[int],
    group: int,
    groups: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    window: int,
    seed: int,
    data: st.DataObject,
) -> None:
    context = Context(seed, lens, group * groups, groups, head_dim, block_size, dtype, cache_dtype)
    parts = []
    for s, n in enumerate(lens):
        start = data.draw(st.one_of(st.just(0), st.just(n - 1), st.integers(0, n - 1)))
        parts.append((s, start, n - start))
    tolerance = max(TOLERANCE[dtype], TOLERANCE[cache_dtype])
    close(context.attend(parts, window), context.expect(parts, window), tolerance)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_a_token_does_not_depend_on_chunks_batch_or_blocks(
    isa: str, dtype: torch.dtype, window: int, threads: None
) -> None:
    lens = [300, 65, 17, 1]
    context = Context(5, lens, heads=6, groups=2, dtype=dtype)
    whole = [context.attend([(s, 0, n)], window) for s, n in enumerate(lens)]
    for s, n in enumerate(lens):
        for at in {0, n // 3, n // 2, max(0, n - 2), n - 1}:
            assert same_bits(context.attend([(s, at, 1)], window), whole[s][at : at + 1]), (s, at)
    for chunk in (2, 16, 50, 64, 128):
        for start in range(0, lens[0], chunk):
            count = min(chunk, lens[0] - start)
            assert same_bits(context.attend([(0, start, count)], window), whole[0][start : start + count])
    together = context.attend([(0, 299, 1), (1, 20, 45), (3, 0, 1), (2, 16, 1)], window)
    assert same_bits(together[:1], whole[0][299:]) and same_bits(together[1:46], whole[1][20:])
    assert same_bits(together[46:47], whole[3]) and same_bits(together[47:], whole[2][16:])
    native.set_num_threads(3)
    assert same_bits(context.attend([(0, 0, 300)], window), whole[0])
    native.set_num_threads(1)
    for block_size in (5, 32):
        moved = Context(5, lens, heads=6, groups=2, block_size=block_size, dtype=dtype)
        moved.q = context.q
        for s, n in enumerate(lens):
            source, target = context.slots(s, n), moved.slots(s, n)
            rows = context.cache[source // 16, :, :, source % 16]
            moved.cache[target // block_size, :, :, target % block_size] = rows
            assert same_bits(moved.attend([(s, 0, n)], window), whole[s])


@pytest.mark.parametrize("window", [0, 70, 700])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [6, 18])
def test_threads_may_share_a_long_context(
    isa: str, heads: int, dtype: torch.dtype, window: int, threads: None
) -> None:
    lens = [1300, 40, 600]
    context = Context(7, lens, heads, groups=2, dtype=dtype)
    whole = [context.attend([(s, 0, n)], window) for s, n in enumerate(lens)]
    for s, n in enumerate(lens):
        close(whole[s], context.expect([(s, 0, n)], window), TOLERANCE[dtype])
    for num_threads in (1, 2, 7):
        native.set_num_threads(num_threads)
        for at in (63, 511, 512, 600, 1023, 1024, 1299):
            assert same_bits(context.attend([(0, at, 1)], window), whole[0][at : at + 1]), (num_threads, at)
        for at in (510, 511, 1023, 1290):
            assert same_bits(context.attend([(0, at, 2)], window), whole[0][at : at + 2]), (num_threads, at)
        together = context.attend([(1, 39, 1), (0, 1298, 2), (2, 0, 600)], window)
        assert same_bits(together[:1], whole[1][39:]) and same_bits(together[1:3], whole[0][1298:])
        assert same_bits(together[3:], whole[2])


@pytest.mark.parametrize("beyond", [-1.0, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sign_of_a_zero_does_not_tell_of_positions_that_others_see(
    isa: str, dtype: torch.dtype, beyond: float
) -> None:
    context = Context(1, [1088], heads=1, groups=1, head_dim=32, dtype=dtype)
    context.scale = 1.0
    context.q[0].zero_()[:, :, 0] = 1
    keys, values = torch.zeros(1088, 1, 32), torch.full((1088, 1, 32), -1e-20)
    keys[512:, :, 0], keys[960:1024, :, 0] = 100, 200  # what is before them weighs nothing
    values[960:1024], values[1024:] = -0.0, beyond
    cpu.store_kv(keys.to(dtype), values.to(dtype), context.cache, context.slots(0, 1088))
    alone = context.attend([(0, 1023, 1)])
    assert not alone.any()
    assert same_bits(context.attend([(0, 1000, 80)])[23:24], alone)


def test_keys_that_are_no_numbers_show_in_whatever_part_of_the_context(isa: str, threads: None) -> None:
    context = Context(2, [1300])
    context.cache[context.tables[0].long()[3], 0, :, 3] = float("nan")
    for num_threads in (1, 4):
        native.set_num_threads(num_threads)
        assert not context.attend([(0, 1299, 1)]).isfinite().any()


@pytest.mark.parametrize("steepness", [3.0, 20.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_keeps_up_with_scores_that_grow_by_any_factor(
    isa: str, dtype: torch.dtype, steepness: float
) -> None:
    context = Context(6, [700], heads=6, groups=2, dtype=dtype)
    context.q = [(q * steepness * torch.linspace(0.1, 1, len(q))[:, None, None]).to(dtype) for q in context.q]
    whole = context.attend([(0, 0, 700)])
    close(whole, context.expect([(0, 0, 700)]), 2 * TOLERANCE[dtype])
    for at in range(0, 700, 23):
        assert same_bits(context.attend([(0, at, 1)]), whole[at : at + 1]), at


def test_attention_shows_keys_that_are_no_numbers(isa: str) -> None:
    context = Context(2, [40, 40])
    blocks = context.tables[0].long()
    context.cache[blocks[1], 0, :, 3] = float("nan")
    out = context.attend([(0, 0, 40), (1, 0, 40)])
    assert out[:19].isfinite().all() and out[40:].isfinite().all()
    assert not out[19:40].isfinite().any()


def test_a_batch_of_nothing_gives_nothing(isa: str) -> None:
    context = Context(3, [5])
    q, batch = context.batch([(0, 4, 1)])
    empty = replace(
        batch,
        query_starts=torch.zeros(1, dtype=torch.int32),
        context_lens=torch.zeros(0, dtype=torch.int32),
        block_tables=context.tables[:0],
    )
    assert native.paged_attention(q[:0], context.cache, empty, 1.0, 0).shape == (0, *q.shape[1:])
    assert native.linear(torch.zeros(0, 8), native.pack_linear(torch.ones(4, 8), None)).shape == (0, 4)


# ---- threads ----


def test_callers_in_several_threads_get_their_own_results(threads: None) -> None:
    native.set_num_threads(2)
    g = torch.Generator().manual_seed(4)
    packed = native.pack_linear(random(g, 640, 256), None)
    inputs = [random(g, 40, 256) for _ in range(4)]
    expected = [native.linear(x, packed) for x in inputs]

    def differs(index: int) -> int:
        return sum(not same_bits(native.linear(inputs[index], packed), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(differs, range(4))) == [0, 0, 0, 0]


def test_threads_without_work_use_no_time(threads: None) -> None:
    native.set_num_threads(3)
    x = torch.randn(64, 64)
    native.linear(x, native.pack_linear(torch.randn(640, 64), None))
    before = time.process_time()
    Event().wait(1.0)
    assert time.process_time() - before < 0.5  # of the two seconds that two spinning threads would take
