"""The whole engine on Triton's kernels, against the engine on the specification."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common import weights
from common.cache import Cache, make_layout
from common.config import EngineConfig
from common.engine import Engine
from common.graphs import RecordedModel, Step
from common.messages import ModelInfo
from common.model import Model
from common.model_config import ModelConfig
from common.model_source import ModelFiles
from common.startup import choose_block_ops, choose_sampling
from kernels import Ops, cpu, triton
from kernels.triton import decode
from tests import golden
from tests.common import tiny_models
from tests.common.paged_loop import PagedLoop
from tests.common.test_engine import hand_over
from tests.common.toy import make_sequence, run

CPU = torch.device("cpu")
EXPECTED = golden.family_logits()
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 64, 60
SMALLER = {"num_hidden_layers": 2}


@pytest.fixture(autouse=True, scope="module")
def _few_parts() -> Iterator[None]:
    """Interpreted programs are slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "PROGRAMS", 8)
        yield


def load(directory: Path, name: str, ops: Ops, **changes: Any) -> Model:
    written = tiny_models.write(directory / name, name, **changes)
    files = ModelFiles(name, written, (written / "model.safetensors",), "")
    config = ModelConfig.load(written)
    return Model(config, weights.load(files, config, torch.float32, CPU), ops, torch.float32, CPU)


def make_engine(model: Model, recorded: bool = False) -> Engine:
    config = model.config
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
    layout, block_ops = make_layout("tiny", "float32", *sizes), choose_block_ops(model.ops)
    cache = Cache(layout, NUM_BLOCKS, CPU, staged=True, block_ops=block_ops)
    options = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=24, check_invariants=True)
    runner = model if not recorded else RecordedModel(model, cache.layers, NUM_BLOCKS, 4, MAX_LEN, again)
    card = ModelInfo("tiny", "tiny", config.vocab_size, MAX_LEN)
    return Engine(runner, cache, card, options, (2,), sampling=choose_sampling(model.ops))


def again(step: Step) -> Step:
    """Stands in for a recorder: replays by computing from the same places."""
    return step


@pytest.mark.parametrize("name", ["llama-biases", "llama3", "mistral-window", "qwen3"])
def test_a_model_computes_the_references_logits(tmp_path: Path, name: str) -> None:
    loop = PagedLoop(load(tmp_path, name, triton), num_blocks=2)
    tokens = tiny_models.TOKENS
    logits = torch.cat([loop.compute(part) for part in (tokens[:13], tokens[13:15], tokens[15:])])
    for position, expected in EXPECTED[name].items():
        torch.testing.assert_close(logits[position], torch.tensor(expected), atol=2e-4, rtol=0)


def tokens_of(engine: Engine) -> list[list[int]]:
    """Prompts of several chunks, one alone, one whose beginning is cached by then, greedy and drawn."""
    prompts = [
        [(seed * position + 5) % 40 for position in range(length)]
        for seed, length in ((7, 30), (11, 3), (13, 9))
    ]
    sequences = [
        make_sequence(f"r{i}", tokens, max_tokens=4, temperature=0.8 * (i == 1), seed=i, ignore_eos=True)
        for i, tokens in enumerate([*prompts, [*prompts[0][:20], 1, 2]])
    ]
    for sequence in sequences[:3]:
        engine.add(sequence)
    run(engine)
    engine.add(sequences[3])
    run(engine)
    assert sequences[3].num_cached_tokens == 20
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def test_an_engine_gives_the_specifications_tokens(tmp_path: Path) -> None:
    expected = tokens_of(make_engine(load(tmp_path, "qwen3", cpu, **SMALLER)))
    assert [len(tokens) for tokens in expected] == [4] * 4
    found = tokens_of(make_engine(load(tmp_path, "qwen3", triton, **SMALLER), recorded=True))
    assert found == expected


def test_a_sequence_goes_on_where_its_blocks_have_landed(tmp_path: Path) -> None:
    prompt = tiny_models.TOKENS[:18]
    whole = make_sequence("whole", prompt, max_tokens=8)
    engine = make_engine(load(tmp_path, "llama3", cpu, **SMALLER))
    engine.add(whole)
    run(engine)
    model = load(tmp_path, "llama3", triton, **SMALLER)
    source, target = make_engine(model), make_engine(model)
    sequence = make_sequence("half", prompt, handoff=True, max_tokens=8)
    successor = hand_over(source, target, sequence)
    run(target)
    assert successor.token_ids == whole.token_ids
