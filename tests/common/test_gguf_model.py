"""GGUF files: what their metadata becomes, and which are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common import gguf_model, weights
from common.model import Model
from common.model_config import ModelConfig, ModelError
from common.model_source import ModelFiles
from kernels import cpu
from tests import golden
from tests.common import tiny_gguf, tiny_models
from tests.common.paged_loop import PagedLoop

CPU = torch.device("cpu")


def written(directory: Path, family: str = "llama", **details: Any) -> Path:
    config = tiny_models.write_config(directory / "config", family, **details.pop("changes", {}))
    return tiny_gguf.write(directory / "model.gguf", config, **details)


def export(path: Path) -> ModelFiles:
    directory = path.parent / "exported"
    gguf_model.export(path, directory)
    return ModelFiles("tiny", directory, (path,), "")


def logits(files: ModelFiles) -> torch.Tensor:
    config = ModelConfig.load(files.directory)
    model = Model(config, weights.load(files, config, torch.float32, CPU), cpu, torch.float32, CPU)
    return PagedLoop(model, num_blocks=2).compute(tiny_models.TOKENS)


@pytest.mark.parametrize("family", ["llama", "llama-biases", "qwen2", "qwen3", "mistral"])
def test_a_model_computes_the_same_from_gguf_as_from_safetensors(tmp_path: Path, family: str) -> None:
    changes = {"attention_bias": True, "mlp_bias": False} if family == "llama-biases" else {}
    computed = logits(export(written(tmp_path, family, changes=changes)))
    if changes:
        directory = tiny_models.write(tmp_path / "plain", family, **changes)
        expected = logits(ModelFiles(family, directory, (directory / "model.safetensors",), ""))
        torch.testing.assert_close(computed, expected)
        return
    for position, row in golden.family_logits()[family].items():
        torch.testing.assert_close(computed[position], torch.tensor(row), atol=2e-4, rtol=0)


def test_configuration_survives_the_export(tmp_path: Path) -> None:
    original = tiny_models.write_config(tmp_path / "config", "qwen3")
    exported = ModelConfig.load(export(written(tmp_path, "qwen3")).directory)
    differing = [name for name in original.__slots__ if getattr(original, name) != getattr(exported, name)]
    assert set(differing) == {
        "bos_token_id",
        "eos_token_ids",
        "rms_norm_eps",
    }  # the last one is a float32 in the file
    assert exported.rms_norm_eps == pytest.approx(original.rms_norm_eps)
    assert exported.eos_token_ids == (0,)


def test_rotary_divisors_of_the_file_are_used(tmp_path: Path) -> None:
    path = written(tmp_path)
    plain = logits(export(path))
    document = json.loads((tmp_path / "exported/config.json").read_text())
    document["rope_scaling"] = {"rope_type": "factors", "factors": [1.0, 2.0, 2.0, 8.0]}
    (tmp_path / "exported/config.json").write_text(json.dumps(document))
    scaled = logits(ModelFiles("tiny", tmp_path / "exported", (path,), ""))
    assert not torch.allclose(plain[5], scaled[5], atol=1e-3)
    torch.testing.assert_close(plain[0], scaled[0])  # position 0 is not turned


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    computed = logits(export(path))
    for position, row in golden.family_logits()["llama-linear-rope"].items():
        torch.testing.assert_close(computed[position], torch.tensor(row), atol=2e-4, rtol=0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general__architecture": "gemma3"}, "unsupported architecture 'gemma3'"),
    ({"llama__rope__scaling__type": "yarn"}, "yarn"),
    ({"llama__expert_count": 8}, "mixture of experts"),
    ({"llama__attention__head_count": [4, 4, 2]}, "llama.attention.head_count must be one positive integer"),
    ({"llama__embedding_length": None}, "llama.embedding_length is missing"),
    ({"llama__rope__dimension_count": 4}, "part of each head"),
    ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokenizer__ggml__model": "t5"}, "tokenizer model 't5'"),
    ({"tokenizer__ggml__pre": "chameleon"}, "pre-tokenizer 'chameleon'"),
    ({"split__count": 3}, "split GGUF file"),
]


@pytest.mark.parametrize(("metadata", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], reason: str
) -> None:
    path = written(tmp_path, **metadata)
    with pytest.raises(ModelError, match=reason):
        ModelConfig.load(export(path).directory)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.999])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, share: float) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=r"model\.gguf: not a complete GGUF file"):
        export(path)


def test_a_file_cut_after_its_export_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    files = export(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ModelError, match="truncated: tensor"):
        logits(files)
