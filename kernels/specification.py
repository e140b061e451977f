"""What GPUs have kernels for beside ``Ops``, in plain PyTorch: what those are tested against.

Letters in shapes as in ``kernels``; R rows of D values in a block."""

import torch
from torch import Tensor


def gather_blocks(cache: Tensor, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks ``block_ids`` [n] int64 of ``cache`` [N, R, D], in ``dtype`` -> [n, R, D]."""
    return cache.index_select(0, block_ids).to(dtype)


def quantize_blocks(cache: Tensor, block_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The blocks as int8 or float8_e4m3fn [n, R, D], and their scales [n, R] float32: the largest value of a
    row becomes the largest of the type."""
    values = gather_blocks(cache, block_ids, torch.float32)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    scales = values.abs().amax(-1) / limits.max
    values = values / torch.where(scales == 0, 1, scales)[..., None]
    return (values if dtype.is_floating_point else values.round()).to(dtype), scales


def scatter_blocks(values: Tensor, scales: Tensor | None, block_ids: Tensor, cache: Tensor) -> None:
    """Write ``values`` [n, R, D], times ``scales`` [n, R] if there are any, into the blocks ``block_ids`` [n]
    int64, which must differ, of ``cache`` [N, R, D]."""
    wide = values.float() if scales is None else values.float() * scales[..., None]
    cache.index_copy_(0, block_ids, wide.to(cache.dtype))


def best_each(logits: Tensor) -> tuple[list[int], list[float]]:
    """For each row of ``logits`` [S, V] float32 the first of the likeliest tokens, and its logit. Not a
    number counts as likeliest."""
    token_ids = logits.argmax(-1)
    return token_ids.tolist(), logits.gather(1, token_ids[:, None]).flatten().tolist()


def draw_each(logits: Tensor, choices: Tensor) -> Tensor:
    """For each row of ``logits`` [S, V] float32 the token [S] int64 at which the distribution that is left
    passes the chance. ``choices`` [S, 5] float64: temperature, min-p, top-k (0: all), top-p, and the chance,
    in [0, 1). Among equally likely tokens top-k and top-p take all or none."""
    temperatures, min_ps, top_ks, top_ps, chances = torch.split(choices, 1, dim=1)  # [S, 1] each
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperatures.float()).exp()
    weights = weights.masked_fill(weights < min_ps.float(), 0)
    ordered = weights.sort(-1, descending=True).values
    last = torch.where(top_ks > 0, top_ks, logits.shape[1]).clamp(max=logits.shape[1]).long() - 1
    weights = weights.masked_fill(weights < ordered.gather(1, last), 0)
    ordered = weights.sort(-1, descending=True).values.double()
    targets = top_ps * ordered.sum(-1, keepdim=True)
    last = torch.searchsorted(ordered.cumsum(-1), targets).clamp(max=logits.shape[1] - 1)
    bounds = torch.where(top_ps < 1, ordered.gather(1, last), 0)
    sums = weights.masked_fill(weights < bounds, 0).double().cumsum(-1)
    return torch.searchsorted(sums, chances * sums[:, -1:], right=True)[:, 0]


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
    places, owners = torch.unique(rows.long() * logits.shape[1] + token_ids, return_inverse=True)
    counts = torch.zeros(places.shape, device=logits.device).index_add_(0, owners, is_output.float())
    row, values = places // logits.shape[1], logits.flatten()[places]
    values = torch.where(values > 0, values / repetition[row], values * repetition[row])
    values = values - frequency[row] * counts - presence[row] * (counts > 0)
    logits.view(-1)[places] = values
