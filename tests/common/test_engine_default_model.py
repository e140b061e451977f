"""The engine with a real model: the reference's tokens, in any company and however a prompt is cut."""

from collections.abc import Iterable

import pytest
import torch

from common import weights
from common.cache import Cache, make_layout
from common.config import EngineConfig
from common.engine import Engine
from common.messages import ModelInfo
from common.model import Model
from common.model_config import ModelConfig
from common.model_source import resolve
from common.sequence import Sequence
from kernels import cpu
from tests import golden
from tests.common.toy import make_sequence, run

CPU = torch.device("cpu")
NAMES = ("short-one", "short-story", "chat-multi")
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> Model:
    files = resolve("smollm2-135m-instruct")
    config = ModelConfig.load(files.directory)
    return Model(config, weights.load(files, config, torch.float32, CPU), cpu, torch.float32, CPU)


def make_engine(model: Model, block_size: int, max_num_batched_tokens: int, num_tokens: int = 1024) -> Engine:
    shape = model.config
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_tokens // block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        check_invariants=True,
    )
    layout = make_layout(
        "golden", "float32", shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size
    )
    card = ModelInfo("golden", "golden", shape.vocab_size, 1024)
    return Engine(model, Cache(layout, config.num_blocks, CPU), card, config, shape.eos_token_ids)


def submit(engine: Engine, names: Iterable[str], attempt: int = 0) -> dict[str, Sequence]:
    prompts = golden.load()
    sequences = {
        name: make_sequence(name, prompts[name].prompt_ids, max_tokens=NUM_TOKENS, attempt=attempt)
        for name in names
    }
    for sequence in sequences.values():
        engine.add(sequence)
    return sequences


def check(sequences: dict[str, Sequence]) -> None:
    prompts = golden.load()
    for name, sequence in sequences.items():
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        assert len(output) == NUM_TOKENS
        assert prompts[name].difference(output) is None


@pytest.mark.parametrize(("block_size", "max_num_batched_tokens"), [(16, 512), (32, 16)])
def test_says_what_the_reference_says_together_in_chunks_and_from_the_prefix_cache(
    model: Model, block_size: int, max_num_batched_tokens: int
) -> None:
    engine = make_engine(model, block_size, max_num_batched_tokens)
    cold = submit(engine, NAMES)
    run(engine)
    check(cold)
    warm = submit(engine, NAMES, attempt=1)
    run(engine)
    check(warm)
    assert warm["chat-multi"].num_cached_tokens >= 32


def test_says_what_the_reference_says_when_sequences_take_blocks_from_each_other(model: Model) -> None:
    engine = make_engine(model, 1, 64, num_tokens=82)
    sequences = submit(engine, NAMES)
    run(engine)
    check(sequences)
    assert engine.counters()["preemptions_total"] > 0
