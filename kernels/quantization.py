"""Weights as whole numbers: what "int8" and "int4" mean, whoever computes with them.

Every 32 inputs of an output share a scale in half precision, for int4 also the value that 0 stands for. A
GGUF file's Q8_0, Q4_0 and Q4_1 are such numbers already. The kernels in C keep int8 in another way, for
activations that are whole numbers, too: rows are turned first and 192 inputs share a scale in single
precision (``native/csrc/rotation.c``)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Quantization = Literal["int8", "int4"]
BlockFormat = Literal["Q8_0", "Q4_0", "Q4_1"]
GROUP = 32
INT4_FACTOR = 256.0  # keeps small scales in the normal range of half precision
LARGEST_WEIGHT = 250.0  # where a product on the way leaves half precision
BLOCK_BYTES: dict[BlockFormat, int] = {"Q8_0": 2 + 32, "Q4_0": 2 + 16, "Q4_1": 4 + 16}
KIND_OF_FORMAT: dict[BlockFormat, Quantization] = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight matrix as a GGUF file holds it."""

    rows: Tensor  # [O, I / 32 * BLOCK_BYTES[format]] uint8
    format: BlockFormat
    dtype: torch.dtype  # of the activations that it will meet

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)"""
        return self.rows.shape[0], self.rows.shape[1] // BLOCK_BYTES[self.format] * GROUP

    @property
    def kind(self) -> Quantization:
        return KIND_OF_FORMAT[self.format]

    def halves(self, index: int) -> Tensor:
        """The first (0) or second (1) half-precision number of each block, [O, blocks, 1] float32."""
        blocks = self.rows.view(len(self.rows), -1, BLOCK_BYTES[self.format])
        return blocks[..., 2 * index : 2 * index + 2].contiguous().view(torch.float16).float()

    def largest(self) -> float:
        """No weight is larger than this."""
        scale = self.halves(0).abs()
        if self.format == "Q4_1":
            return float((15 * scale + self.halves(1).abs()).max())
        return float(scale.max()) * (128 if self.format == "Q8_0" else 8)

    def values(self) -> Tensor:
        """The weights [O, I]."""
        values = self.numbers() * self.halves(0)
        if self.kind == "int4":
            values += self.least()
        return values.flatten(1).to(self.dtype)

    def numbers(self) -> Tensor:
        """The whole numbers [O, I / 32, 32]: int8, or uint8 from 0 to 15."""
        blocks = self.rows.view(len(self.rows), -1, BLOCK_BYTES[self.format])
        if self.format == "Q8_0":
            return blocks[..., 2:].view(torch.int8)
        pairs = blocks[..., -16:]
        return torch.cat([pairs & 15, pairs >> 4], dim=-1)

    def least(self) -> Tensor:
        """What 0 stands for in each block of 4-bit numbers, [O, I / 32, 1] float32."""
        return self.halves(1) if self.format == "Q4_1" else -8 * self.halves(0)


def on_grid(weight: Tensor, kind: Quantization) -> Tensor:
    """``weight`` [O, I] as what is left of it in whole numbers, in its own type. ``ValueError`` for weights
    too large for that."""
    groups = in_groups(weight, kind)
    if kind == "int8":
        numbers, scale = int8_numbers(groups)
        values = numbers * scale
    else:
        numbers, scale, least = int4_numbers(groups)
        values = least + numbers * scale
    return values.flatten(1)[:, : weight.shape[1]].to(weight.dtype)


def in_groups(weight: Tensor, kind: Quantization, multiple: int = GROUP) -> Tensor:
    """``weight`` [O, I] as [O, groups, GROUP] float32, zeros behind its inputs up to a ``multiple``.
    ``ValueError`` for weights too large to be kept as ``kind``."""
    check_range(float(weight.abs().max()), kind)
    return F.pad(weight.float(), (0, -weight.shape[1] % multiple)).view(len(weight), -1, GROUP)


def int8_numbers(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers like ``groups`` and their scales [O, groups, 1], all float32. The largest magnitude
    becomes 127, or a little less when half precision rounds the scale up."""
    most = groups.abs().amax(-1, keepdim=True)
    half = (most / 127).half()
    scale = torch.where(
        half.float() * 127 < most, (half.view(torch.int16) + 1).view(torch.float16), half
    ).float()
    return torch.where(scale > 0, (groups / scale).round(), 0.0), scale


def int4_numbers(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers like ``groups``, their scales, and what 0 stands for, both [O, groups, 1]; all float32.
    The least value becomes 0, the greatest 15."""
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((highest - lowest) / 15 * INT4_FACTOR).half().float() / INT4_FACTOR
    least = (lowest * INT4_FACTOR).half().float() / INT4_FACTOR
    return torch.where(scale > 0, ((groups - least) / scale).round().clamp(0, 15), 0.0), scale, least


def check_range(largest: float, kind: Quantization, limit: float = LARGEST_WEIGHT) -> None:
    """``ValueError`` unless weights of up to ``largest`` can be kept."""
    if not largest <= limit:
        raise ValueError(f"weights of up to {largest:.3g} cannot be kept as {kind}")
