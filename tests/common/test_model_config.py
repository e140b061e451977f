"""config.json: what is understood, and what is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from common.model_config import ModelConfig, ModelError, RopeScaling
from common.rope import inverse_frequencies
from tests.common import tiny_models


def read(directory: Path, name: str = "llama", **changes: Any) -> ModelConfig:
    return tiny_models.write_config(directory, name, **changes)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GemmaForCausalLM"]}, "unsupported architecture GemmaForCausalLM"),
    ({"architectures": None, "model_type": "gpt2"}, "unsupported architecture model_type 'gpt2'"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(method gptq\)"),
    ({"num_local_experts": 8}, r"mixture of experts \(num_local_experts = 8\)"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number, not None"),
    ({"rope_scaling": [1, 2]}, "rope_scaling must be an object"),
    ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "factors must be 4 positive numbers"),
    ({"hidden_size": 0}, "hidden_size must be a positive integer, not 0"),
    ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
    ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, not None"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3 key/value heads"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
    ({"attention_bias": 1}, "attention_bias must be true or false"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        read(tmp_path, **changes)


def test_a_directory_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json: "):
        ModelConfig.load(tmp_path)


def test_ends_come_from_both_files_without_repetition(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2, 7, 9)
    assert read(tmp_path, eos_token_id=[5]).eos_token_ids == (5, 7, 2, 9)


def test_a_model_type_is_enough_where_no_architecture_is_named(tmp_path: Path) -> None:
    assert read(tmp_path, "qwen3", architectures=[]).family == "qwen3"


def test_head_dim_follows_from_the_heads_where_it_is_not_given(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=None).head_dim == 8
    assert read(tmp_path, head_dim=32).head_dim == 32


def test_rope_is_read_under_its_newer_name(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0}
    config = read(tmp_path, rope_theta=None, rope_parameters=rope)
    assert config.rope_theta == 77.0
    assert config.rope_scaling == RopeScaling("linear", factor=3.0)


def test_windows_are_those_of_the_layers_that_use_one(tmp_path: Path) -> None:
    assert read(tmp_path, "mistral").windows == (0, 0, 0)
    assert read(tmp_path, "mistral-window").windows == (5, 5, 5)
    assert read(tmp_path, "qwen2").windows == (0, 0, 0)
    assert read(tmp_path, "qwen2-window").windows == (0, 5, 5)
    named = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(tmp_path, "qwen2-window", layer_types=named).windows == (5, 0, 5)
    with pytest.raises(ModelError, match="layer_types must name 3"):
        read(tmp_path, "qwen2-window", layer_types=["chunked_attention"] * 3)


def test_biases_and_norms_are_those_of_the_family(tmp_path: Path) -> None:
    flags = {
        name: (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm)
        for name in ("llama", "llama-biases", "mistral", "qwen2", "qwen3")
        for config in [read(tmp_path, name)]
    }
    assert flags == {
        "llama": (False, False, False, False),
        "llama-biases": (True, True, True, False),
        "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False),
        "qwen3": (False, False, False, True),
    }


def test_llama3_stretches_slow_frequencies_only() -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    plain = inverse_frequencies(128, 500000.0, RopeScaling())
    scaled = inverse_frequencies(128, 500000.0, scaling)
    turns = [8192 * frequency / (2 * math.pi) for frequency in plain]
    for before, after, count in zip(plain, scaled, turns, strict=True):
        if count > 4:
            assert after == before
        elif count < 1:
            assert after == before / 8
        else:
            assert before / 8 < after < before
