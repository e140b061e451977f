"""For tests of kernels: what a kernel leaves unwritten shows."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def poison() -> Iterator[None]:
    """New tensors are full of NaN, or of the largest number where there is no NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
