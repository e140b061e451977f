"""Rotary position embedding: the inverse frequencies of a model and the table that ``Ops.rotary`` reads.

Formulas: Su et al., 2021 (plain); Chen et al., 2023 (linear position interpolation); Llama 3.1's model card
code (``llama3``: long wavelengths divided by ``factor``, short ones kept, a linear blend between).
"""

import math

import torch
from torch import Tensor

from common.model_config import ModelConfig, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """Radians per position of each of the ``head_dim / 2`` pairs."""
    plain = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    if scaling.kind == "linear":
        return [frequency / scaling.factor for frequency in plain]
    if scaling.kind == "factors":
        return [frequency / factor for frequency, factor in zip(plain, scaling.factors, strict=True)]
    if scaling.kind == "llama3":
        return [stretch(frequency, scaling) for frequency in plain]
    return plain


def stretch(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # within the trained context
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return frequency * (kept + (1 - kept) / scaling.factor)


def cos_sin_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, head_dim] float32: cosines, then sines."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    inverse = torch.tensor(frequencies, dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
