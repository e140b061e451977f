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
    ("choice", "dtype", "instruction_set", "expected"),
    [
        ("auto", "auto", "amx", "auto"),
        ("auto", "auto", "avx512_bf16", "int8"),
        ("auto", "auto", "avx512", "int8"),
        ("auto", "auto", "avx2", "auto"),
        ("auto", "auto", None, "none"),
        ("auto", "float32", "avx512", "none"),
        ("auto", "bfloat16", "amx", "none"),
        ("int8", "float32", None, "int8"),
        ("int4", "auto", "avx512", "int4"),
        ("none", "auto", "amx", "none"),
    ],
)
def test_weights_are_whole_numbers_where_kernels_gain_by_it_and_nobody_asked_for_a_type(
    choice: Quantization, dtype: Dtype, instruction_set: str | None, expected: str
) -> None:
    assert resolve_quantization(choice, dtype, instruction_set) == expected
