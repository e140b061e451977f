from dataclasses import replace

import torch

from benchmarks.gpu.models import LLAMA_8B
from common import gpu
from common.config import EngineConfig

CONFIG = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=64)


def test_a_step_has_room_for_its_widest_tensors_and_takes_no_large_share_of_a_gpu() -> None:
    found = gpu.step_bytes(LLAMA_8B, CONFIG, torch.bfloat16)
    gate_up, logits = 2048 * 2 * 14336 * 2, 64 * 128_256 * 4
    assert 2 * gate_up + 2 * logits < found < 2 << 30


def test_room_grows_with_what_a_step_may_hold() -> None:
    base = gpu.step_bytes(LLAMA_8B, CONFIG, torch.bfloat16)
    assert gpu.step_bytes(LLAMA_8B, replace(CONFIG, max_num_batched_tokens=4096), torch.bfloat16) > base
    assert gpu.step_bytes(LLAMA_8B, replace(CONFIG, max_num_seqs=128), torch.bfloat16) > base
    assert gpu.step_bytes(LLAMA_8B, CONFIG, torch.float32) > base


def test_main_memory_needs_no_choice_of_device() -> None:
    gpu.use(torch.device("cpu"))
