"""Which numbers a weight matrix is kept in, by what was asked and what the file holds."""

from pathlib import Path

import pytest
import torch

from common import gguf_model, weights
from common.config import Quantization
from common.linears import Linears
from common.model_config import ModelConfig, ModelError
from common.model_source import ModelFiles
from kernels import LinearWeight, cpu
from kernels.quantization import BlockWeight, on_grid
from tests.common import tiny_gguf, tiny_models

CPU = torch.device("cpu")
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


class Recorder:
    """Packs as the specification does and notes what it was given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def pack_linear(
        self, weight: torch.Tensor | BlockWeight, bias: torch.Tensor | None, kind: str | None = None
    ) -> LinearWeight:
        self.given.append(weight.format if isinstance(weight, BlockWeight) else kind or "none")
        return cpu.pack_linear(weight, bias, kind)  # type: ignore[arg-type]


def open_gguf(directory: Path, kind: str) -> weights.Weights:
    config = tiny_models.write_config(directory / "config", "llama")
    path = tiny_gguf.write(directory / "model.gguf", config, types={f"attn_{x}.weight": kind for x in "qkv"})
    gguf_model.export(path, directory / "exported")
    files = ModelFiles("tiny", directory / "exported", (path,), "")
    return weights.load(files, ModelConfig.load(files.directory), torch.float32, CPU)


def kept(opened: weights.Weights, choice: Quantization, *names: str) -> tuple[str, torch.Tensor]:
    recorder = Recorder()
    packed = Linears(opened, recorder, choice).read(False, *names)  # type: ignore[arg-type]
    return recorder.given[-1], packed.data[0]


@pytest.mark.parametrize(
    ("stored", "choice", "expected"),
    [
        ("Q4_1", "none", "none"),
        ("Q4_1", "auto", "Q4_1"),
        ("Q4_1", "int4", "Q4_1"),
        ("Q4_1", "int8", "int8"),
        ("Q8_0", "auto", "Q8_0"),
        ("Q8_0", "int8", "Q8_0"),
        ("Q8_0", "int4", "int4"),
        ("F16", "auto", "int8"),
        ("F16", "int4", "int4"),
    ],
)
def test_blocks_are_taken_as_they_are_where_they_are_what_was_asked_for(
    tmp_path: Path, stored: str, choice: Quantization, expected: str
) -> None:
    opened = open_gguf(tmp_path, stored)
    found, values = kept(opened, choice, *QKV)
    assert found == expected
    torch.testing.assert_close(values, opened.read(*(f"{name}.weight" for name in QKV)), atol=0.1, rtol=0.02)


def test_blocks_come_in_the_order_of_rows_of_the_tensors(tmp_path: Path) -> None:
    opened = open_gguf(tmp_path, "Q8_0")  # whose rows of queries and keys are in an order of their own
    _, values = kept(opened, "auto", *QKV)
    torch.testing.assert_close(values.bfloat16().float(), opened.read(*(f"{name}.weight" for name in QKV)))


def test_logits_get_eight_bits_where_other_matrices_get_four(tmp_path: Path) -> None:
    assert kept(open_gguf(tmp_path, "F16"), "int4", "model.embed_tokens")[0] == "int8"


def test_a_safetensors_checkpoint_is_rounded(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path, "llama")
    files = ModelFiles("tiny", directory, (directory / "model.safetensors",), "")
    opened = weights.load(files, ModelConfig.load(directory), torch.float32, CPU)
    found, values = kept(opened, "auto", *QKV)
    assert found == "int8"
    assert torch.equal(values, on_grid(opened.read(*(f"{name}.weight" for name in QKV)), "int8"))


def test_numbers_too_large_are_kept_as_they_are_or_refused_by_name(tmp_path: Path) -> None:
    opened = open_gguf(tmp_path, "F16")
    huge = weights.Weights(Huge(opened.checkpoint), torch.float32, CPU)
    found, values = kept(huge, "auto", *QKV)
    assert found == "none" and values.max() == 1000
    with pytest.raises(
        ModelError, match=r"self_attn.q_proj.weight: weights of up to 1e\+03 .*--quantization"
    ):
        kept(huge, "int4", *QKV)


class Huge:
    """A checkpoint of nothing but thousands."""

    def __init__(self, checkpoint: weights.Checkpoint) -> None:
        self.shapes = checkpoint.shapes

    def read_into(self, name: str, target: torch.Tensor) -> None:
        target.fill_(1000)

    def read_blocks(self, name: str) -> None:
        return None

    def file_of(self, name: str) -> str:
        return "huge"
