"""Every kernel against the specification, on the device, and in bfloat16, which the interpreter cannot do."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.steps import Shape, Step, make_step
from kernels import AttentionBatch, cpu, specification
from kernels import triton as gpu
from kernels.quantization import Quantization
from kernels.triton import blocks, sampling

TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SEQUENCES = [(1, 1), (1, 300), (0, 5), (3, 40), (8, 8), (20, 90), (70, 70), (65, 500)]
# G, H / G, D, B, and the window. Each takes seconds to compile, so that one has to do for other types.
SHAPES = [(2, 4, 128, 16, 0), (2, 4, 128, 16, 17), (1, 8, 64, 32, 0), (2, 3, 80, 64, 17), (3, 1, 96, 16, 0)]
KINDS: tuple[Quantization, ...] = ("int8", "int4")


class Case(NamedTuple):
    name: str
    found: Tensor
    expected: Tensor
    tolerance: float | None = None  # in place of its type's


class Agreement(NamedTuple):
    name: str
    error: float  # the largest of all cases, as a share of what is tolerated
    num_cases: int


def agreements(cases: Iterator[Case], dtype: torch.dtype) -> list[Agreement]:
    """New tensors are full of NaN meanwhile, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    worst: dict[str, tuple[float, int]] = {}
    try:
        for case in cases:
            error, count = worst.get(case.name, (0.0, 0))
            share = share_of_tolerance(case.found, case.expected, case.tolerance or TOLERANCE[dtype])
            worst[case.name] = max(error, share), count + 1
    finally:
        torch.use_deterministic_algorithms(False)
    return [Agreement(name, *result) for name, result in worst.items()]


def share_of_tolerance(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """Above 1: too far apart, NaN included."""
    if not found.numel():
        return 0.0
    wide = expected.double()
    shares = (found.double() - wide).abs() / (tolerance * (1 + wide.abs()))
    return float(shares.nan_to_num(torch.inf).max())


def attention_cases(device: torch.device, dtype: torch.dtype, is_small: bool) -> Iterator[Case]:
    sequences = SEQUENCES[:6] if is_small else SEQUENCES
    for groups, heads, head_dim, block_size, window in SHAPES if dtype == torch.bfloat16 else SHAPES[:1]:
        shape = Shape(groups, heads, head_dim, block_size, dtype)
        for batch in (sequences, [(1, 200)] * 3, [(1, 900)]):
            step = on(device, make_step(batch[: 2 if is_small else 8], shape))
            found = gpu.paged_attention(step.q, step.cache, step.batch, 0.2, window)
            wide = step.wide()
            expected = cpu.paged_attention(wide.q, wide.cache, wide.batch, 0.2, window)
            yield Case("attention", found, expected)


def on(device: torch.device, step: Step) -> Step:
    batch = step.batch
    moved = AttentionBatch(
        batch.query_starts.to(device),
        batch.context_lens.to(device),
        batch.block_tables.to(device),
        batch.slots.to(device),
        batch.positions.to(device),
        batch.max_query_len,
        batch.max_context_len,
    )
    return Step(step.q.to(device), step.cache.to(device), moved)


def row_cases(device: torch.device, dtype: torch.dtype, is_small: bool) -> Iterator[Case]:
    width = 100 if is_small else 4096
    x, residual, weight = (torch.randn(rows, width, device=device).to(dtype) for rows in (5, 5, 1))
    yield Case("norm", gpu.rms_norm(x, weight[0], 1e-5), cpu.rms_norm(x, weight[0], 1e-5))
    pair = zip(
        gpu.add_rms_norm(x, residual, weight[0], 1e-5),
        cpu.add_rms_norm(x, residual, weight[0], 1e-5),
        strict=True,
    )
    yield from (Case("norm with residual", *both) for both in pair)
    yield Case("gate", gpu.silu_mul(x), cpu.silu_mul(x))
    heads = torch.randn(5, 6, 80, device=device).to(dtype)
    positions, angles = torch.tensor([3, 0, 9, 11, 2], device=device), torch.randn(12, 40, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    q, k = cpu.rotary(heads[:, :4], heads[:, 4:], positions, cos_sin)
    caches = [torch.zeros(3, 2, 2, 16, 80, device=device, dtype=dtype) for _ in range(2)]
    cpu.store_kv(heads[:, 4:], heads[:, 2:4], caches[0], positions)
    gpu.store_kv(heads[:, 4:], heads[:, 2:4], caches[1], positions)
    yield Case("store", caches[1], caches[0])
    found_q, found_k = gpu.rotary(heads[:, :4], heads[:, 4:], positions, cos_sin)
    yield Case("rotary", found_q, q)
    yield Case("rotary", found_k, k)


def linear_cases(device: torch.device, dtype: torch.dtype, is_small: bool) -> Iterator[Case]:
    width = 96 if is_small else 1024
    weight = (torch.randn(width + 3, width, device=device) * width**-0.5).to(dtype)
    for kind, rows in itertools.product(KINDS, (1, 40)):
        x = torch.randn(rows, width, device=device).to(dtype)
        found = gpu.linear(x, gpu.pack_linear(weight, None, kind))
        rounded = cpu.pack_linear(weight, None, kind).data[0].float()
        yield Case(f"linear {kind}", found, cpu.linear(x.float(), cpu.pack_linear(rounded, None)))


def block_cases(device: torch.device, dtype: torch.dtype, is_small: bool) -> Iterator[Case]:
    cache = torch.randn(5, 48, 128, device=device).to(dtype)
    ids = torch.tensor([4, 0, 2], device=device)
    gathered = specification.gather_blocks(cache, ids, dtype)
    yield Case("gather", blocks.gather_blocks(cache, ids, dtype), gathered)
    # The interpreter loses the carry when it rounds to float8.
    for kind in (torch.int8,) if is_small else (torch.int8, torch.float8_e4m3fn):
        name = f"there and back as {str(kind).removeprefix('torch.')}"
        found, expected = torch.zeros_like(cache), torch.zeros_like(cache)
        blocks.scatter_blocks(*blocks.quantize_blocks(cache, ids, kind), ids, found)
        specification.scatter_blocks(*specification.quantize_blocks(cache, ids, kind), ids, expected)
        # Where the last bit of a quotient decides which number is closest, a value may be a step off, the
        # largest of its row, and another one in bfloat16, whose steps are as large: but few are.
        steps = cache.float().abs().amax(-1, keepdim=True) / (127 if kind == torch.int8 else 14)
        apart = (found.float() - expected.float()) / steps
        yield Case(name, apart, torch.zeros_like(apart), tolerance=2.1)
        share = (apart.abs() > 0.1).float().mean()
        yield Case(f"{name}, how many differ", share, torch.zeros_like(share), tolerance=1e-3)


def sampling_cases(device: torch.device, _: torch.dtype, is_small: bool) -> Iterator[Case]:
    vocab = 200 if is_small else 128_256
    logits = 3 * torch.randn(6, vocab, device=device)
    row = torch.arange(6, device=device)
    choices = torch.stack([0.5 + row / 4, 0.01 * row, 20 * row, 1 - row / 10, 0.1 + row / 8], 1).double()
    drawn = sampling.draw_each(logits, choices)
    # Weights and sums may differ in their last bits: a chance may lie on the border of two tokens.
    nearby = torch.tensor([0, 0, 0, 0, 1e-6], dtype=torch.float64, device=device)
    allowed = torch.stack([specification.draw_each(logits, choices + sign * nearby) for sign in (-1, 0, 1)])
    yield Case("draw", (drawn == allowed).any(0).float(), torch.ones(6, device=device))
    token_ids = torch.randint(0, vocab, (300,), device=device)
    rows, is_output = (token_ids % 6).int(), token_ids % 5 < 2
    penalties = (1 + row / 10, row / 9, row / 7)
    penalized = [logits.clone(), logits.clone()]
    sampling.penalize(penalized[0], token_ids, rows, is_output, *penalties)
    specification.penalize(penalized[1], token_ids, rows, is_output, *penalties)
    yield Case("penalties", penalized[0], penalized[1])


Cases = Callable[[torch.device, torch.dtype, bool], Iterator[Case]]
KERNELS: tuple[Cases, ...] = (row_cases, block_cases, sampling_cases, linear_cases, attention_cases)
