"""From a model's name to its files."""

import json
import os
from pathlib import Path

import pytest

from common.model_config import ModelConfig, ModelError
from common.model_source import resolve
from tests.common import tiny_gguf, tiny_models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_built_in_model_is_found_by_its_name() -> None:
    files = resolve("smollm2-135m-instruct")
    assert files.name == "smollm2-135m-instruct"
    config = ModelConfig.load(files.directory)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) == (30, 9, 3, 49152)
    assert config.eos_token_ids == (2,)
    assert {path.name for path in files.directory.iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}


def test_a_directory_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    directory = tiny_models.write(tmp_path / "tiny", "llama")
    files = resolve(str(directory))
    assert (files.name, files.directory) == ("tiny", directory)
    assert files.weights == (directory / "model.safetensors",)


def test_a_gguf_file_is_exported_once(tmp_path: Path, cache: Path) -> None:
    config = tiny_models.write_config(tmp_path / "config", "llama")
    path = tiny_gguf.write(tmp_path / "small-one.gguf", config)
    files = resolve(str(path))
    assert (files.name, files.weights) == ("small-one", (path,))
    assert files.directory.is_relative_to(cache)
    marks = {entry.name: entry.stat().st_mtime_ns for entry in files.directory.iterdir()}
    assert resolve(str(path)) == files
    assert {entry.name: entry.stat().st_mtime_ns for entry in files.directory.iterdir()} == marks


def test_a_gguf_file_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path, cache: Path) -> None:
    config = tiny_models.write_config(tmp_path / "config", "llama")
    path = tiny_gguf.write(tmp_path / "model.gguf", config, general__architecture="mamba")
    with pytest.raises(ModelError, match=r"model\.gguf: unsupported architecture 'mamba'"):
        resolve(str(path))


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path, cache: Path) -> None:
    first = tiny_models.write(tmp_path / "first", "llama")
    second = tiny_models.write(tmp_path / "second", "llama")
    assert resolve(str(first)).fingerprint == resolve(str(second)).fingerprint


def test_the_fingerprint_tells_weights_and_configurations_apart(tmp_path: Path, cache: Path) -> None:
    directory = tiny_models.write(tmp_path / "model", "llama")
    before = resolve(str(directory)).fingerprint
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    other_weights = resolve(str(directory)).fingerprint
    tiny_models.write_config(directory, "llama", rope_theta=501.0)
    other_configuration = resolve(str(directory)).fingerprint
    assert len({before, other_weights, other_configuration}) == 3


def test_a_name_that_leads_nowhere_is_named(cache: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model: no such directory"):
        resolve("no-such-model")


def test_a_file_that_is_no_model_is_named(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"notes\.txt: neither a model directory nor a \.gguf file"):
        resolve(str(tmp_path / "notes.txt"))


def test_a_hub_id_without_the_hub_is_an_error_and_not_a_wait(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing-at-all: .* could not be fetched"):
        resolve("nobody/nothing-at-all")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, cache: Path) -> None:
    directory = tiny_models.write(tmp_path / "model", "llama")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
        resolve(str(directory))


def test_a_directory_without_weights_is_refused(tmp_path: Path, cache: Path) -> None:
    directory = tiny_models.write(tmp_path / "model", "llama")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"0 \*\.safetensors files and no model\.safetensors\.index\.json"):
        resolve(str(directory))


@pytest.mark.parametrize("shard", ["missing.safetensors", "../outside.safetensors"])
def test_an_index_may_name_only_files_that_are_there(tmp_path: Path, cache: Path, shard: str) -> None:
    directory = tiny_models.write(tmp_path / "model", "llama")
    (directory / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"no such file, though model\.safetensors\.index\.json names it"):
        resolve(str(directory))
