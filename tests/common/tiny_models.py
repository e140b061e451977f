"""Models small enough to write anew for each test, one for each way in which the family's members differ.

Weights are written by formula, not drawn: the reference implementation got the very same ones when it made
tests/golden/families.json.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.model_config import ModelConfig
from common.weights import expected_shapes

VOCAB_SIZE = 40
TOKENS = [(7 * index + index * index) % VOCAB_SIZE for index in range(24)]  # one sequence for all of them
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-without-groups": LLAMA | {"num_key_value_heads": 4},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-linear-rope": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": LLAMA | {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True},
    "mistral": MISTRAL | {"sliding_window": None, "head_dim": 16},
    "mistral-window": MISTRAL | {"sliding_window": 5},
    "qwen2": QWEN2 | {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1},
    "qwen2-window": QWEN2 | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": QWEN3 | {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True},
}


def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Looks random enough; weights of norms lie around 1."""
    count = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
    wave = torch.frac(torch.sin(count * 12.9898 + zlib.crc32(name.encode()) % 1000) * 43758.5453)
    if len(shape) == 1 and "norm" in name:
        return (1 + wave / 2).float().view(shape)
    return (wave * (0.2 if len(shape) == 1 else 4 / shape[-1] ** 0.5)).float().view(shape)


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    return {name: tensor(name, shape) for name, shape in expected_shapes(config)}


def write_config(directory: Path, name: str, **changes: Any) -> ModelConfig:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(COMMON | FAMILIES[name] | changes))
    return ModelConfig.load(directory)


def write(directory: Path, name: str, **changes: Any) -> Path:
    """A whole model directory, but for a tokenizer that means anything."""
    config = write_config(directory, name, **changes)
    save_file(tensors(config), directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    return directory
