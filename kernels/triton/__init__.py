"""Kernels for GPUs: the operations of ``kernels.Ops`` in Triton, and what else runs beside them there.

They also run without a GPU, slowly, in Triton's interpreter (``TRITON_INTERPRET=1``), which shows that they
compute the right thing. There bfloat16 does not work.

``attention.py`` has the way through its parts; ``blocks.py`` packs blocks for transfers, ``sampling.py``
draws tokens. Results do not depend on where blocks lie, but the last bits may depend on what else is in the
batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import Forward, LayerWeights
from kernels.triton.activation import silu_mul
from kernels.triton.attention import paged_attention
from kernels.triton.launch import INTERPRETED
from kernels.triton.linear import linear, pack_linear
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotary
from kernels.triton.sampling import draw, penalize
from kernels.triton.store import store_kv

__all__ = [
    "INTERPRETED",
    "add_rms_norm",
    "available",
    "draw",
    "embedding",
    "fuse",
    "linear",
    "pack_linear",
    "paged_attention",
    "penalize",
    "rms_norm",
    "rotary",
    "silu_mul",
    "store_kv",
]


def available(device: torch.device) -> str | None:
    """None when these kernels can be used on ``device``, otherwise why not."""
    if device.type == "cuda" or INTERPRETED:
        return None
    return f"Triton kernels need a GPU, or TRITON_INTERPRET=1, not {device}"


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, token_ids)


def fuse(
    layers: Sequence[LayerWeights],
    embedding: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> Forward | None:
    return None  # recorded launches take the interpreter out of a step
