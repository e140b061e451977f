"""Which token comes next, for many sequences in one launch.

A row is never sorted. The bounds of top-k and top-p are found by bisection over the bits of a positive float,
which are ordered as the floats are: 31 passes over a row that stays in the cache of the GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # values in a turn: 16 a thread with 8 warps, so that a vocabulary of 128,256 takes 32 turns


@triton.jit
def weight_of(logits_ptr, first, num_tokens, best, temperature, bound, TILE: tl.constexpr):
    """exp((logit - best) / temperature) of a tile; 0 below ``bound`` and where there is no token."""
    at = first + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + at, mask=at < num_tokens, other=float("-inf"))
    weights = tl.exp((logits - best) / temperature)
    return tl.where(weights >= bound, weights, 0.0)


@triton.jit
def mass_above(logits_ptr, num_tokens, best, temperature, bound, IS_COUNT: tl.constexpr, TILE: tl.constexpr):
    """How many tokens weigh at least ``bound``, or what these weigh together (float64)."""
    total = tl.zeros([], tl.float64)
    for first in range(0, num_tokens, TILE):
        weights = weight_of(logits_ptr, first, num_tokens, best, temperature, bound, TILE)
        if IS_COUNT:
            total += tl.sum((weights > 0.0).to(tl.int32), 0).to(tl.float64)
        else:
            total += tl.sum(weights.to(tl.float64), 0)
    return total


@triton.jit
def raise_bound(
    logits_ptr, num_tokens, best, temperature, bound, target, IS_COUNT: tl.constexpr, TILE: tl.constexpr
):
    """The largest bound, not below ``bound``, above which the mass is still at least ``target``."""
    low = bound.to(tl.int32, bitcast=True)
    high = tl.full([], 0x3F800001, tl.int32)  # next after 1.0, the weight of the best token
    while high - low > 1:
        middle = low + (high - low) // 2
        candidate = middle.to(tl.float32, bitcast=True)
        is_enough = mass_above(logits_ptr, num_tokens, best, temperature, candidate, IS_COUNT, TILE) >= target
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def draw_kernel(
    logits_ptr,  # [S, V] float32
    choices_ptr,  # [S, 5] float64
    out_ptr,  # [S] int64
    num_tokens,
    TILE: tl.constexpr,
):
    # Grid (S,). Programs with nothing to cut make three passes over their row, others up to 62 more.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_tokens
    choice_ptr = choices_ptr + row * 5
    temperature = tl.load(choice_ptr).to(tl.float32)
    min_p = tl.load(choice_ptr + 1).to(tl.float32)
    top_k = tl.load(choice_ptr + 2)
    top_p = tl.load(choice_ptr + 3)
    chance = tl.load(choice_ptr + 4)
    best = tl.full([], float("-inf"), tl.float32)
    for first in range(0, num_tokens, TILE):
        at = first + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + at, mask=at < num_tokens, other=float("-inf"))
        best = tl.maximum(best, tl.max(logits, 0))
    # At least the smallest normal float: what weighs nothing is never drawn.
    bound = tl.maximum(min_p, 1.1754943508222875e-38)
    if (top_k > 0) & (top_k < num_tokens):
        count = tl.minimum(top_k, mass_above(logits_ptr, num_tokens, best, temperature, bound, True, TILE))
        bound = raise_bound(logits_ptr, num_tokens, best, temperature, bound, count, True, TILE)
    total = mass_above(logits_ptr, num_tokens, best, temperature, bound, False, TILE)
    if top_p < 1.0:
        target = top_p * total
        bound = raise_bound(logits_ptr, num_tokens, best, temperature, bound, target, False, TILE)
        total = mass_above(logits_ptr, num_tokens, best, temperature, bound, False, TILE)
    target = chance * total
    # The first token at which the sum passes the target: as many come before it as do not pass.
    before = tl.zeros([], tl.float64)
    index = tl.zeros([], tl.int64)
    last = tl.zeros([], tl.int64)
    for first in range(0, num_tokens, TILE):
        weights = weight_of(logits_ptr, first, num_tokens, best, temperature, bound, TILE)
        at = first + tl.arange(0, TILE)
        sums = before + tl.cumsum(weights.to(tl.float64), 0)
        index += tl.sum(((sums <= target) & (at < num_tokens)).to(tl.int64), 0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0), 0).to(tl.int64))
        before += tl.sum(weights.to(tl.float64), 0)
    tl.store(out_ptr + row, tl.minimum(index, last))  # sums in another order may end a little below the total


@triton.jit(do_not_specialize=["num_listed"])  # another number each step
def count_kernel(
    token_ids_ptr,  # [tokens] int64, of all sequences
    rows_ptr,  # [tokens] int32: whose they are
    is_output_ptr,  # [tokens] bool
    counts_ptr,  # [S, V] int32, 0 before
    num_listed,
    num_tokens,
    TILE: tl.constexpr,
):
    # Grid (tokens / TILE,). Bit 30 tells that the token occurs, the bits below how often in the output.
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < num_listed
    row = tl.load(rows_ptr + at, mask=inside, other=0).to(tl.int64)
    place = counts_ptr + row * num_tokens + tl.load(token_ids_ptr + at, mask=inside, other=0)
    is_output = tl.load(is_output_ptr + at, mask=inside, other=0).to(tl.int32)
    tl.atomic_add(place, is_output, mask=inside)
    tl.atomic_or(place, 1 << 30, mask=inside)


@triton.jit
def penalize_kernel(
    logits_ptr,  # [S, V] float32, changed
    counts_ptr,  # [S, V] int32
    repetition_ptr,  # [S] float32
    presence_ptr,  # [S] float32
    frequency_ptr,  # [S] float32
    num_tokens,
    TILE: tl.constexpr,
):
    # Grid (S, V / TILE).
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < num_tokens
    place = row * num_tokens + at
    logits = tl.load(logits_ptr + place, mask=inside, other=0.0)
    marks = tl.load(counts_ptr + place, mask=inside, other=0)
    count = (marks & 0x3FFFFFFF).to(tl.float32)
    repetition = tl.load(repetition_ptr + row)
    weakened = tl.where(logits > 0.0, logits / repetition, logits * repetition)
    logits = tl.where(marks > 0, weakened, logits)
    presence = tl.where(count > 0.0, tl.load(presence_ptr + row), 0.0)
    tl.store(logits_ptr + place, logits - tl.load(frequency_ptr + row) * count - presence, mask=inside)


def draw_each(logits: Tensor, choices: Tensor) -> Tensor:
    """As ``kernels.specification.draw_each``."""
    assert logits.is_contiguous() and choices.is_contiguous() and choices.dtype == torch.float64
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if out.numel():
        draw_kernel[(len(out),)](logits, choices, out, logits.shape[1], TILE=TILE, num_warps=8)
    return out


def draw(rows: list[Tensor], choices: list[tuple[float, float, int, float, float]]) -> list[int]:
    """The same for rows of logits [V] float32 that lie apart, in one launch."""
    logits = torch.stack(rows)
    tokens: list[int] = draw_each(
        logits, torch.tensor(choices, dtype=torch.float64).to(logits.device)
    ).tolist()
    return tokens


def penalize(
    logits: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    is_output: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Change ``logits`` [S, V] float32 by the tokens so far: ``token_ids`` [n] int64 of the sequences
    ``rows`` [n] int32, of the prompt or ``is_output`` [n] bool; penalties [S] float32. Repetition (Keskar et
    al., 2019) looks at all of them, presence and frequency (OpenAI) at the output."""
    assert logits.is_contiguous()
    num_rows, num_tokens = logits.shape
    if not num_rows:
        return
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    if len(token_ids):
        count_kernel[(triton.cdiv(len(token_ids), TILE),)](
            token_ids, rows, is_output, counts, len(token_ids), num_tokens, TILE=TILE
        )
    penalize_kernel[(num_rows, triton.cdiv(num_tokens, TILE))](
        logits, counts, repetition, presence, frequency, num_tokens, TILE=TILE
    )
