import pytest
import torch

from common.dtypes import resolve_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("saved", "tiles", "expected"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float16", True, torch.float32),
        ("float32", True, torch.float32),
    ],
)
def test_a_cpu_uses_bfloat16_where_it_is_fast_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, saved: str, tiles: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert resolve_dtype(saved, CPU) == expected


@pytest.mark.parametrize("saved", ["bfloat16", "float16", "float32"])
def test_a_gpu_uses_the_type_the_weights_were_saved_in(saved: str) -> None:
    assert resolve_dtype(saved, GPU) == getattr(torch, saved)


def test_the_answer_is_the_same_every_time_on_one_machine() -> None:
    assert len({resolve_dtype("bfloat16", CPU) for _ in range(5)}) == 1
