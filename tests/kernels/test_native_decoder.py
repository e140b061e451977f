"""A whole step in one call: what the operations give one by one, and the same bits however the tokens of a
sequence are spread over steps and whoever shares them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import AttentionBatch, Forward, LayerWeights, cpu, native
from kernels.quantization import Quantization
from tests.kernels.test_native import REASON, isa, random, same_bits  # noqa: F401 (isa is a fixture)

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

HIDDEN, WIDE, HEADS, GROUPS, HEAD_DIM, VOCABULARY, BLOCK, EPS = 96, 160, 6, 2, 32, 50, 16, 1e-5
NUM_BLOCKS = 50


class Net:
    """Two random layers with all that a layer may have, in one type, and a cache for it."""

    def __init__(self, dtype: torch.dtype, kind: Quantization | None = None, wide: int = WIDE) -> None:
        g = torch.Generator().manual_seed(3)
        self.dtype = dtype

        def tensor(*shape: int) -> Tensor:
            return (random(g, *shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)).to(dtype)

        def norm(width: int) -> Tensor:
            return (1 + 0.1 * random(g, width)).to(dtype)

        qkv_rows = (HEADS + 2 * GROUPS) * HEAD_DIM
        shapes = ((qkv_rows, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * wide, HIDDEN), (HIDDEN, wide))
        self.embedding = random(g, VOCABULARY, HIDDEN).to(dtype)
        angles = random(g, 800, HEAD_DIM // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.plain, packed = [], []
        for window in (0, 40):
            norms = (norm(HIDDEN), norm(HEAD_DIM), norm(HEAD_DIM), norm(HIDDEN))
            weights = [(tensor(*shape), tensor(shape[0])) for shape in shapes]
            self.plain.append(layer(norms, [cpu.pack_linear(*pair) for pair in weights], window))
            packed.append(layer(norms, [native.pack_linear(*pair, kind) for pair in weights], window))
        fused = native.fuse(packed, self.embedding, self.cos_sin, HEADS, GROUPS, HEAD_DIM, EPS)
        assert fused is not None
        self.forward: Forward = fused
        self.caches = self.new_caches()

    def new_caches(self) -> list[Tensor]:
        shape = (NUM_BLOCKS, 2, 2, GROUPS, BLOCK, HEAD_DIM)
        return list(torch.full(shape, float("nan"), dtype=self.dtype).unbind(1))


def layer(norms: tuple[Tensor, Tensor, Tensor, Tensor], linears: list[object], window: int) -> LayerWeights:
    input_norm, q_norm, k_norm, mlp_norm = norms
    qkv, o, gate_up, down = linears
    return LayerWeights(input_norm, qkv, q_norm, k_norm, o, mlp_norm, gate_up, down, window)  # type: ignore[arg-type]


def batch(parts: list[tuple[int, int, int]]) -> AttentionBatch:
    """Of ``parts``: (first block of the sequence, first position, number of positions)."""
    counts = torch.tensor([0] + [count for _, _, count in parts])
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])
    slots = torch.cat([torch.arange(start, start + count) + block * BLOCK for block, start, count in parts])
    longest = max(start + count for _, start, count in parts)
    width = max(8, -(-longest // BLOCK))
    return AttentionBatch(
        query_starts=counts.cumsum(0).int(),
        context_lens=torch.tensor([start + count for _, start, count in parts], dtype=torch.int32),
        block_tables=torch.tensor([range(block, block + width) for block, _, _ in parts], dtype=torch.int32),
        slots=slots,
        positions=positions,
        max_query_len=int(counts.max()),
        max_context_len=longest,
    )


def one_by_one(net: Net, token_ids: Tensor, step: AttentionBatch) -> Tensor:
    caches = net.new_caches()
    residual = cpu.embedding(token_ids, net.embedding)
    update = torch.zeros_like(residual)
    for weights, cache in zip(net.plain, caches, strict=True):
        assert weights.q_norm is not None and weights.k_norm is not None
        x, residual = cpu.add_rms_norm(update, residual, weights.input_norm, EPS)
        heads = cpu.linear(x, weights.qkv).view(-1, HEADS + 2 * GROUPS, HEAD_DIM)
        q, k, v = torch.split(heads, [HEADS, GROUPS, GROUPS], dim=1)
        q, k = cpu.rms_norm(q, weights.q_norm, EPS), cpu.rms_norm(k, weights.k_norm, EPS)
        q, k = cpu.rotary(q, k, step.positions, net.cos_sin)
        cpu.store_kv(k, v, cache, step.slots)
        mixed = cpu.paged_attention(q, cache, step, HEAD_DIM**-0.5, weights.window)
        x, residual = cpu.add_rms_norm(
            cpu.linear(mixed.flatten(1), weights.o), residual, weights.mlp_norm, EPS
        )
        update = cpu.linear(cpu.silu_mul(cpu.linear(x, weights.gate_up)), weights.down)
    return residual + update


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    native.set_num_threads(1)


@pytest.mark.parametrize(
    ("dtype", "kind", "tolerance"),
    [
        (torch.float32, None, 1e-4),
        (torch.bfloat16, None, 0.05),
        (torch.float16, None, 0.01),
        (torch.bfloat16, "int8", 0.08),
        (torch.bfloat16, "int4", 0.3),
    ],
    ids=str,
)
def test_a_step_is_what_its_operations_are(
    isa: str,  # noqa: F811
    dtype: torch.dtype,
    kind: Quantization | None,
    tolerance: float,
) -> None:
    net = Net(dtype, kind)
    parts = [(1, 0, 70), (10, 0, 3), (20, 0, 1)]
    token_ids = tokens(74, 1)
    expected = one_by_one(net, token_ids, batch(parts)).float()
    actual = net.forward(token_ids, batch(parts), net.caches).float()
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("wide", [1, 72, 144])
def test_gates_and_what_they_let_through_need_not_fill_panels(isa: str, wide: int) -> None:  # noqa: F811
    net = Net(torch.bfloat16, None, wide)
    token_ids, parts = tokens(43, 1), [(1, 0, 40), (10, 0, 3)]
    expected = one_by_one(net, token_ids, batch(parts)).float()
    actual = net.forward(token_ids, batch(parts), net.caches).float()
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, "int8"),
        (torch.bfloat16, "int4"),
    ],
    ids=str,
)
def test_a_sequence_is_the_same_bits_in_any_company_and_in_chunks_of_any_size(
    isa: str,  # noqa: F811
    dtype: torch.dtype,
    kind: Quantization | None,
    threads: None,
) -> None:
    net = Net(dtype, kind)
    token_ids, others = tokens(110, 2), tokens(300, 3)
    whole = net.forward(token_ids, batch([(1, 0, 110)]), net.caches)
    for chunk in (1, 7, 16, 33, 64):
        net.caches = net.new_caches()
        for start in range(0, 110, chunk):
            count = min(chunk, 110 - start)
            part = net.forward(token_ids[start : start + count], batch([(9, start, count)]), net.caches)
            assert same_bits(part, whole[start : start + count]), (chunk, start)
    net.caches = net.new_caches()
    native.set_num_threads(2)
    together = torch.cat([others[:90], token_ids[:50], others[90:91]])
    step = batch([(20, 0, 90), (1, 0, 50), (30, 0, 1)])
    assert same_bits(net.forward(together, step, net.caches)[90:140], whole[:50])
    rest = torch.cat([token_ids[50:], others[:1]])
    step = batch([(1, 50, 60), (20, 90, 1)])
    assert same_bits(net.forward(rest, step, net.caches)[:60], whole[50:])


@pytest.mark.parametrize(
    "rows", [[], [89], [85, 86, 87, 88, 89, 140], [40, *range(90, 141)], [139, 140]], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")],
    ids=str,
)
def test_rows_that_are_asked_for_are_the_same_bits_without_the_others(
    isa: str,  # noqa: F811
    dtype: torch.dtype,
    kind: Quantization | None,
    rows: list[int],
    threads: None,
) -> None:
    net = Net(dtype, kind)
    native.set_num_threads(2)
    token_ids, step = tokens(141, 5), batch([(40, 0, 41), (20, 0, 49), (1, 0, 50), (30, 0, 1)])
    whole, caches = net.forward(token_ids, step, net.caches), net.caches
    net.caches = net.new_caches()
    some = net.forward(
        token_ids, replace(step, output_rows=torch.tensor(rows, dtype=torch.int64)), net.caches
    )
    assert same_bits(some, whole[rows])
    assert all(same_bits(here, there) for here, there in zip(net.caches, caches, strict=True))


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int4")], ids=str
)
def test_a_long_step_is_the_same_bits_however_threads_share_its_rows(
    isa: str,  # noqa: F811
    dtype: torch.dtype,
    kind: Quantization | None,
    threads: None,
) -> None:
    net = Net(dtype, kind)
    token_ids, step = tokens(720, 4), batch([(1, 0, 720)])
    whole = net.forward(token_ids, step, net.caches)  # one thread: several blocks of rows, one by one
    caches = net.caches
    for count in (2, 3):
        net.caches = net.new_caches()
        native.set_num_threads(count)
        assert same_bits(net.forward(token_ids, step, net.caches), whole)
        assert all(same_bits(a[1:46], b[1:46]) for a, b in zip(net.caches, caches, strict=True))
    for size in (90, 40, 12):
        net.caches = net.new_caches()
        for start in range(0, 360, size):
            part = net.forward(token_ids[start : start + size], batch([(1, start, size)]), net.caches)
            assert same_bits(part, whole[start : start + size]), (size, start)
