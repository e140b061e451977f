"""What is left to oneMKL is called once before several threads may, see ``settle_vector_functions``."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels

ROOT = Path(__file__).parents[2]
FOLDERS = ("common", "kernels", "prefill_worker", "decode_worker", "kv_transfer")
# aten/src/ATen/cpu/vml.h
LEFT_TO_MKL = """acos asin atan cos cosh erf erfc erfinv exp expm1 lgamma log log10 log1p log2
sin sinh sqrt tan tanh trunc"""
NOT_TENSORS = {"math", "np", "logger", "tl"}


def test_each_function_is_called_before_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def function(x: Tensor) -> Tensor:
        assert torch.get_num_threads() == 1
        called.append(x.numel())
        return x

    torch.set_num_threads(1)
    monkeypatch.setattr(kernels, "VECTOR_FUNCTIONS", (function, function))
    kernels.select(torch.device("cpu"), 2)
    assert called == [1, 1]
    assert torch.get_num_threads() == 2


def test_no_function_that_is_used_was_forgotten() -> None:
    used = set(calls())
    assert {"cos", "exp"} <= used
    assert used <= {function.__name__ for function in kernels.VECTOR_FUNCTIONS}


def calls() -> Iterator[str]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = node.func.value
                    name = node.func.attr.removesuffix("_")  # in place
                    if name in LEFT_TO_MKL.split() and getattr(owner, "id", "") not in NOT_TENSORS:
                        yield name
