import json
from pathlib import Path

import pytest

from common.config import ConfigError, EngineConfig
from common.model_config import ModelConfig
from control_plane import memory

GIB = 1 << 30
# A Llama of 8 billion parameters, as its config.json describes it.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return ModelConfig.load(tmp_path)


def test_counts_parameters(model: ModelConfig) -> None:
    assert memory.num_parameters(model) == pytest.approx(8.03e9, rel=0.001)


def test_what_fits_passes(model: ModelConfig) -> None:
    memory.require_enough("m", model, [EngineConfig(device="cpu", dtype="float16")], 16 * GIB)
    memory.require_enough("m", model, [EngineConfig(device="cuda:0", dtype="float32")] * 8, GIB)


def test_too_many_workers_are_refused_with_both_numbers(model: ModelConfig) -> None:
    text = r"--model: m in 2 workers needs at least 30\.5 GiB of memory and 16\.0 GiB are available"
    with pytest.raises(ConfigError, match=text):
        memory.require_enough("m", model, [EngineConfig(device="cpu", dtype="bfloat16")] * 2, 16 * GIB)
    with pytest.raises(ConfigError, match=r"needs at least 30\.2 GiB"):
        memory.require_enough("m", model, [EngineConfig(device="cpu", dtype="float32")], 16 * GIB)


def test_a_cache_of_given_size_counts(model: ModelConfig) -> None:
    engine = EngineConfig(device="cpu", dtype="bfloat16", kv_cache_memory_bytes=4 * GIB)
    with pytest.raises(ConfigError, match=r"needs at least 19\.\d GiB"):
        memory.require_enough("m", model, [engine], 16 * GIB)


def test_this_machine_has_some_memory() -> None:
    assert memory.available_bytes() > 0
