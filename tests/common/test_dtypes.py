import pytest
import torch

from common.config import Dtype, Quantization
from common.dtypes import resolve_dtype, resolve_quantization

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("saved", "tiles", "pairs", "expected"),
    [
        ("bfloat16", True, True, torch.bfloat16),
        ("bfloat16", False, True, torch.bfloat16),
        ("bfloat16", False, False, torch.float32),
        ("float16", True, True, torch.float32),
        ("float32", True, True, torch.float32),
    ],
)
def test_a_cpu_uses_bfloat16_where_it_is_fast_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, saved: str, tiles: bool, pairs: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: pairs)
    assert resolve_dtype(saved, CPU) == expected


@pytest.mark.parametrize("saved", ["bfloat16", "float16", "float32"])
def test_a_gpu_uses_the_type_the_weights_were_saved_in(saved: str) -> None:
    assert resolve_dtype(saved, GPU) == getattr(torch, saved)


def test_the_answer_is_the_same_every_time_on_one_machine() -> None:
    assert len({resolve_dtype("bfloat16", CPU) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    ("choice", "dtype", "compiled", "expected"),
    [
        ("auto", "auto", True, "auto"),
        ("auto", "auto", False, "none"),
        ("auto", "float32", True, "none"),
        ("auto", "bfloat16", True, "none"),
        ("int8", "float32", False, "int8"),
        ("none", "auto", True, "none"),
    ],
)
def test_weights_are_whole_numbers_where_kernels_gain_by_it_and_nobody_asked_for_a_type(
    choice: Quantization, dtype: Dtype, compiled: bool, expected: str
) -> None:
    assert resolve_quantization(choice, dtype, compiled) == expected
