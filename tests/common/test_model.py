"""The decoder against the reference implementation: the default model's tokens, and the logits of tiny models
that cover every member of the family."""

from pathlib import Path

import pytest
import torch

from common import weights
from common.model import Model
from common.model_config import ModelConfig
from common.model_source import ModelFiles, resolve
from kernels import Ops, Watch, cpu, native
from tests import golden
from tests.common import tiny_models
from tests.common.paged_loop import PagedLoop, generate

CPU = torch.device("cpu")
EXPECTED = golden.family_logits()


@pytest.fixture(scope="module", params=[cpu, native], ids=["PyTorch", "C"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param is native and (reason := native.available()):
        pytest.skip(reason)
    kernels: Ops = request.param
    return kernels


def load(files: ModelFiles, ops: Ops, dtype: torch.dtype = torch.float32) -> Model:
    config = ModelConfig.load(files.directory)
    return Model(config, weights.load(files, config, dtype, CPU), ops, dtype, CPU)


def tiny(directory: Path, ops: Ops, name: str, dtype: torch.dtype = torch.float32) -> Model:
    written = tiny_models.write(directory, name)
    return load(ModelFiles(name, written, (written / "model.safetensors",), ""), ops, dtype)


@pytest.fixture(scope="module")
def default_model(ops: Ops) -> Model:
    return load(resolve("smollm2-135m-instruct"), ops)


@pytest.mark.parametrize("name", ["short-france", "short-one", "chat-multi", "uni-ja"])
def test_default_model_says_what_the_reference_says(default_model: Model, name: str) -> None:
    prompt = golden.load()[name]
    assert prompt.difference(generate(default_model, prompt.prompt_ids, 24)) is None


def test_default_model_says_it_after_a_long_prompt_in_chunks(default_model: Model) -> None:
    prompt = golden.load()["500-gpl"]
    assert prompt.difference(generate(default_model, prompt.prompt_ids, 12, chunk=192)) is None


@pytest.mark.parametrize("chunk", [1, 5, 24])
@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_every_member_of_the_family_computes_the_references_logits(
    tmp_path: Path, ops: Ops, name: str, chunk: int
) -> None:
    loop = PagedLoop(tiny(tmp_path, ops, name), num_blocks=2)
    tokens = tiny_models.TOKENS
    logits = torch.cat([loop.compute(tokens[at : at + chunk]) for at in range(0, len(tokens), chunk)])
    for position, expected in EXPECTED[name].items():
        torch.testing.assert_close(logits[position], torch.tensor(expected), atol=2e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 5])
def test_rows_that_are_asked_for_are_computed_alone(tmp_path: Path, ops: Ops, count: int) -> None:
    model, tokens = tiny(tmp_path, ops, "qwen3"), tiny_models.TOKENS
    whole, loop = PagedLoop(model, num_blocks=2).compute(tokens), PagedLoop(model, num_blocks=2)
    split = len(tokens) - count
    no_rows, rows = torch.arange(0), torch.arange(1, count)
    assert loop.compute(tokens[:split], output_rows=no_rows).shape == (0, whole.shape[1])
    last = loop.compute(tokens[split:], output_rows=rows)
    torch.testing.assert_close(last, whole[split + 1 :], atol=2e-4, rtol=0)


def test_half_precision_stays_near_float32(tmp_path: Path, ops: Ops) -> None:
    logits = PagedLoop(tiny(tmp_path, ops, "qwen3", torch.bfloat16), num_blocks=2).compute(tiny_models.TOKENS)
    assert logits.dtype == torch.float32
    for position, expected in EXPECTED["qwen3"].items():
        assert (logits[position] - torch.tensor(expected)).abs().mean() < 0.1


@pytest.mark.parametrize(("every", "told"), [(1, [1, 2, 3]), (2, [2, 3]), (9, [3])])
def test_layers_that_were_told_of_are_not_written_any_more(
    tmp_path: Path, ops: Ops, every: int, told: list[int]
) -> None:
    model = tiny(tmp_path, ops, "llama")
    loop = PagedLoop(model, num_blocks=2)
    seen: list[int] = []
    copies: list[list[torch.Tensor]] = []

    def tell(num_layers: int) -> None:
        seen.append(num_layers)
        copies.append([cache.clone() for cache in loop.caches[:num_layers]])

    loop.compute(tiny_models.TOKENS, Watch(every, tell))
    assert seen == told
    for copied in copies:
        for then, now in zip(copied, loop.caches, strict=False):
            torch.testing.assert_close(then, now, rtol=0, atol=0, equal_nan=True)
