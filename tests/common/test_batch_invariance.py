"""A sequence's logits are the same bits alone and in company, in chunks, from a cached prefix, colocated or
handed over: with the kernels in C, in every type that weights and cache may have."""

from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from common import weights
from common.batch import build
from common.cache import Cache, make_layout
from common.config import KvCacheDtype, Quantization
from common.model import Model
from common.model_config import ModelConfig
from common.model_source import ModelFiles
from common.scheduler import Work
from common.sequence import Sequence
from kernels import native
from tests.common import tiny_models
from tests.common.toy import make_sequence

REASON = native.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_TOKENS = 75
NUM_BLOCKS = 5  # of a sequence of that length
COMPANY = 31
CASES: list[tuple[torch.dtype, Quantization, KvCacheDtype]] = [
    (torch.float32, "none", "float32"),
    (torch.bfloat16, "none", "bfloat16"),
    (torch.float32, "int8", "float32"),
    (torch.bfloat16, "int8", "int8"),
    (torch.bfloat16, "int4", "bfloat16"),
    (torch.float32, "none", "int8"),
]


class Variant(NamedTuple):
    model: Model
    kv_cache_dtype: str


class Worker(NamedTuple):
    """A model and a cache, as one process has them."""

    model: Model
    cache: Cache

    def compute(self, works: Items[Work]) -> Tensor:
        """Logits of all rows of a step."""
        with torch.inference_mode():
            batch = build(works, BLOCK_SIZE, CPU)
            attention = replace(batch.attention, output_rows=None)
            hidden = self.model.forward(batch.token_ids, attention, self.cache.layers)
            return self.model.logits(hidden)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{str(case[0])[6:]}-{case[1]}-{case[2]}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Variant:
    dtype, quantization, kv_cache_dtype = request.param
    directory = tiny_models.write(tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=128)
    files = ModelFiles("tiny", directory, (directory / "model.safetensors",), "")
    config = ModelConfig.load(files.directory)
    loaded = weights.load(files, config, dtype, CPU)
    return Variant(Model(config, loaded, native, dtype, CPU, quantization), kv_cache_dtype)


def worker(model: Variant, num_blocks: int = (COMPANY + 2) * NUM_BLOCKS) -> Worker:
    shape = model.model.config
    layout = make_layout(
        "tiny",
        model.kv_cache_dtype,
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        BLOCK_SIZE,
    )
    return Worker(model.model, Cache(layout, num_blocks, CPU))


def sequence(model: Variant, place: int, seed: int = 0) -> Sequence:
    """The sequence that is watched has seed 0; ``place``: which blocks it has."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, model.model.config.vocab_size, (NUM_TOKENS,), generator=generator).tolist()
    made = make_sequence(f"s{seed}", token_ids)
    made.block_ids = list(range(place * NUM_BLOCKS, (place + 1) * NUM_BLOCKS))
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.fixture(scope="module")
def alone(model: Variant) -> Tensor:
    """[NUM_TOKENS, vocabulary], the whole sequence in one step."""
    logits = worker(model).compute([Work(sequence(model, 3), 0, NUM_TOKENS, True)])
    assert logits.dtype == torch.float32 and logits.isfinite().all()
    assert not any(same_bits(a, b) for a, b in pairwise(logits))
    return logits


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_in_chunks(model: Variant, alone: Tensor, chunk: int) -> None:
    here, watched = worker(model), sequence(model, 0)
    for start in range(0, NUM_TOKENS, chunk):
        count = min(chunk, NUM_TOKENS - start)
        logits = here.compute([Work(watched, start, count, True)])
        assert same_bits(logits, alone[start : start + count])


def test_in_a_batch_of_32_that_prefills_and_then_decodes(model: Variant, alone: Tensor) -> None:
    here, watched = worker(model), sequence(model, 20)
    others = [sequence(model, place, seed=place + 1) for place in range(COMPANY + 1) if place != 20]
    before, after = others[:15], others[15:]
    prompt_len = NUM_TOKENS - 3
    works = [Work(other, 0, 5 + index, True) for index, other in enumerate([*before, watched, *after])]
    works[15] = Work(watched, 0, prompt_len, True)
    first_row = sum(work.num_tokens for work in works[:15])
    assert same_bits(here.compute(works)[first_row : first_row + prompt_len], alone[:prompt_len])
    for position in range(prompt_len, NUM_TOKENS):
        steps = [Work(work.sequence, work.num_tokens, 1, True) for work in works]
        steps[15] = Work(watched, position, 1, True)
        assert same_bits(here.compute(steps)[15], alone[position])


@pytest.mark.parametrize("num_cached", [16, 48])
def test_from_blocks_that_another_sequence_has_computed(
    model: Variant, alone: Tensor, num_cached: int
) -> None:
    here, earlier, watched = worker(model), sequence(model, 2), sequence(model, 7)
    earlier.token_ids[num_cached:] = earlier.token_ids[num_cached:][::-1]
    here.compute([Work(earlier, 0, NUM_TOKENS, True)])
    watched.block_ids[: num_cached // BLOCK_SIZE] = earlier.block_ids[: num_cached // BLOCK_SIZE]
    logits = here.compute([Work(watched, num_cached, NUM_TOKENS - num_cached, True)])
    assert same_bits(logits, alone[num_cached:])


def test_handed_over_to_another_worker(model: Variant, alone: Tensor) -> None:
    """Prefilled in chunks on one, the blocks' bytes copied, decoded on the other in company."""
    prefill, decode, prompt_len = worker(model), worker(model), NUM_TOKENS - 4
    sent, landed, other = sequence(model, 1), sequence(model, 6), sequence(model, 9, seed=5)
    for start in range(0, prompt_len, 30):
        prefill.compute([Work(sent, start, min(30, prompt_len - start), True)])
    payload = b"".join(prefill.cache.read(sent.block_ids))
    offset = 0
    for view in decode.cache.landing(landed.block_ids):
        view[:] = payload[offset : offset + len(view)]
        offset += len(view)
    decode.compute([Work(other, 0, 20, True)])
    for position in range(prompt_len, NUM_TOKENS):
        works = [Work(other, 20 + position - prompt_len, 1, True), Work(landed, position, 1, True)]
        assert same_bits(decode.compute(works)[1], alone[position])
