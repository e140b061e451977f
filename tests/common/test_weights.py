"""Reading weights: every type, several files, and what is refused before anything is served."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common import gguf_model, gguf_weights, weights
from common.model_config import ModelConfig, ModelError
from common.model_source import ModelFiles, safetensors_files
from tests.common import tiny_gguf, tiny_models

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # rows of whole 256-element blocks


def open_directory(directory: Path, dtype: torch.dtype = torch.float32) -> weights.Weights:
    files = ModelFiles("tiny", directory, safetensors_files(directory), "")
    return weights.load(files, ModelConfig.load(directory), dtype, CPU)


def open_gguf(directory: Path, **details: Any) -> weights.Weights:
    config = tiny_models.write_config(directory / "config", "llama", **WIDE)
    path = tiny_gguf.write(directory / "model.gguf", config, **details)
    gguf_model.export(path, directory / "exported")
    files = ModelFiles("tiny", directory / "exported", (path,), "")
    return weights.load(files, ModelConfig.load(files.directory), torch.float32, CPU)


def rewrite(directory: Path, change: dict[str, Tensor | None]) -> None:
    path = directory / "model.safetensors"
    tensors: dict[str, Any] = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_tensors_are_read_whole_and_stacked_in_order(tmp_path: Path) -> None:
    opened = open_directory(tiny_models.write(tmp_path, "llama"))
    names = [f"model.layers.2.self_attn.{part}_proj.weight" for part in "qkv"]
    expected = [tiny_models.tensor(name, (rows, 32)) for name, rows in zip(names, (32, 16, 16), strict=True)]
    assert torch.equal(opened.read(*names), torch.cat(expected))


def test_what_is_read_does_not_hang_on_the_file(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path, "llama")
    tensor = open_directory(directory).read(DOWN)
    with (directory / "model.safetensors").open("r+b") as file:
        file.write(bytes(200_000))
    assert torch.equal(tensor, tiny_models.tensor(DOWN, (32, 48)))


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path, "llama")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    half = len(tensors) // 2
    shards = {
        "a.safetensors": dict(list(tensors.items())[:half]),
        "b.safetensors": dict(list(tensors.items())[half:]),
    }
    for name, part in shards.items():
        save_file(part, directory / name)
    index = {name: shard for shard, part in shards.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    opened = open_directory(directory)
    for name, tensor in tensors.items():
        assert torch.equal(opened.read(name), tensor)


def test_half_precision_is_converted_on_reading(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path, "llama")
    expected = tiny_models.tensor(DOWN, (32, 48)).to(torch.float16)
    rewrite(directory, {DOWN: expected})
    assert torch.equal(open_directory(directory).read(DOWN), expected.float())
    assert torch.equal(open_directory(directory, torch.bfloat16).read(DOWN), expected.to(torch.bfloat16))


REFUSED: list[tuple[dict[str, Tensor | None], str]] = [
    ({DOWN: None}, f"tensor {DOWN} is missing"),
    ({DOWN: torch.zeros(32, 47)}, rf"{DOWN} has shape \[32, 47\], expected \[32, 48\]"),
    ({DOWN: torch.zeros(32, 48, dtype=torch.int8)}, f"{DOWN} has type I8"),
    ({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight belongs to a feature"),
    ({"model.layers.3.input_layernorm.weight": torch.ones(32)}, "layers.3.input_layernorm.weight belongs"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: dict[str, Tensor | None], reason: str
) -> None:
    directory = tiny_models.write(tmp_path, "llama")
    rewrite(directory, change)
    with pytest.raises(ModelError, match=reason):
        open_directory(directory)


def test_a_head_written_beside_a_tied_embedding_and_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path, "llama3")
    rewrite(
        directory,
        {
            "lm_head.weight": torch.zeros(40, 32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        },
    )
    assert open_directory(directory).read("model.norm.weight").shape == (32,)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tiny_models.write(tmp_path, "llama") / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a complete safetensors file"):
        open_directory(tmp_path)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_types_come_out_close_to_what_went_in(tmp_path: Path, kind: str) -> None:
    opened = open_gguf(tmp_path, types={"ffn_down.weight": kind, "attn_q.weight": kind})
    tolerance = {"F32": 0.0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.01}.get(kind, 0.13)
    for name, shape in ((DOWN, (256, 512)), (QUERY, (256, 256))):
        expected = tiny_models.tensor(name, shape)
        difference = (opened.read(name) - expected).abs().max() / expected.abs().max()
        assert difference <= tolerance


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_gguf_tensors_are_what_the_library_dequantises_in_bfloat16(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_weights, "PIECE_ELEMENTS", 7 * 512)  # so that the last piece is a shorter one
    opened = open_gguf(tmp_path, types={"ffn_down.weight": kind})
    stored = next(
        tensor
        for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
        if tensor.name == "blk.1.ffn_down.weight"
    )
    whole = torch.from_numpy(np.array(gguf.dequantize(stored.data, stored.tensor_type)))
    assert whole.abs().max() > 0
    assert torch.equal(opened.read(DOWN), whole.bfloat16().float())


def test_a_gguf_type_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"tensor {DOWN} has type Q5_0"):
        open_gguf(tmp_path, types={"blk.1.ffn_down.weight": "Q5_0"})


def test_a_tensor_missing_from_a_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"tensor {DOWN} is missing"):
        open_gguf(tmp_path, leave_out=("blk.1.ffn_down.weight",))
