"""What every launch has in common: whether kernels are interpreted, and sizes of tiles."""

import os
from typing import TypeVar

import triton
from torch import Tensor

# Triton reads the variable where a kernel is defined: it must be set before this package is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALLEST_DOT = 16  # tensor cores multiply no smaller tiles

C = TypeVar("C")


def power_of_two(count: int) -> int:
    """The next one from ``count`` on: tiles have no other sizes."""
    return int(triton.next_power_of_2(count))


def with_whole_heads(x: Tensor) -> Tensor:
    """``x`` [T, heads, D], copied unless a row's heads lie side by side; rows may lie apart."""
    return x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) else x.contiguous()


def tuned(configs: list[C]) -> list[C]:
    """What to choose from: the interpreter has nothing to choose by."""
    return configs[:1] if INTERPRETED else configs
