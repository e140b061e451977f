"""A tiny model for tests of the engine: fast, deterministic, and wrong at once when it reads a wrong block.

Every token stores a random vector as key and one as value. A row's hidden state is a sum over the values of
its whole context, each with a weight of its position, and the next token is the one whose random direction
lies closest to it. Rows are computed one by one, so the same context gives the same bits, however it is cut
into steps.
"""

from typing import Any

import torch
from torch import Tensor

from common.cache import Cache, choose_num_blocks, make_layout
from common.config import EngineConfig
from common.engine import Engine
from common.grammar import Grammars
from common.messages import ModelInfo, Sampling
from common.sequence import Sequence, SequenceKey, StepOutput
from kernels import AttentionBatch

VOCAB_SIZE = 97
EOS = 96
NUM_LAYERS = 2
NUM_HEADS = 2
HEAD_DIM = 8
MAX_MODEL_LEN = 256


class ToyModel:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._table = torch.randn(VOCAB_SIZE, NUM_LAYERS, 2, NUM_HEADS, HEAD_DIM, generator=generator)
        self._weights = torch.randn(MAX_MODEL_LEN, NUM_LAYERS, 2, NUM_HEADS, 1, generator=generator)
        self._head = torch.randn(VOCAB_SIZE, NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM, generator=generator)
        self.max_rows = 0
        self.num_rows = 0

    def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: list[Tensor]) -> Tensor:
        self.max_rows = max(self.max_rows, len(token_ids))
        self.num_rows += len(token_ids)
        stored = self._table[token_ids]
        block_size = caches[0].shape[3]
        for row, slot in enumerate(batch.slots.tolist()):
            for layer, cache in enumerate(caches):
                cache[slot // block_size, :, :, slot % block_size] = stored[row, layer]
        rows = torch.arange(len(token_ids)) if batch.output_rows is None else batch.output_rows
        states = [self._attend(row, batch, caches) for row in rows.tolist()]
        return torch.stack(states) if states else self._head.new_empty(0, self._head.shape[1])

    def _attend(self, row: int, batch: AttentionBatch, caches: list[Tensor]) -> Tensor:
        owner = int(torch.searchsorted(batch.query_starts, row, right=True)) - 1
        length = int(batch.positions[row]) + 1
        end = int(batch.query_starts[owner + 1])
        assert length == int(batch.context_lens[owner]) - (end - 1 - row)
        table = batch.block_tables[owner].long()
        layers = torch.stack([cache[table] for cache in caches])  # [L, blocks, 2, G, B, D]
        context = layers.permute(1, 4, 0, 2, 3, 5).flatten(0, 1)[:length]  # [length, L, 2, G, D]
        return (context * self._weights[:length]).sum(0).flatten()

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.stack([self._head @ row for row in hidden])


def make_config(**changes: Any) -> EngineConfig:
    defaults = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    return EngineConfig(**(defaults | {"check_invariants": True} | changes))


def make_engine(
    model: Any = None,
    max_parked_blocks: int | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    grammars: Grammars | None = None,
    staged: bool = False,
    **changes: Any,
) -> Engine:
    config = make_config(**changes)
    device = torch.device("cpu")
    layout = make_layout("toy", "float32", NUM_LAYERS, NUM_HEADS, HEAD_DIM, config.block_size)
    cache = Cache(layout, choose_num_blocks(config, layout, max_model_len, device), device, staged)
    card = ModelInfo("toy", "toy", VOCAB_SIZE, max_model_len)
    return Engine(model or ToyModel(), cache, card, config, [EOS], max_parked_blocks, grammars)


def make_sequence(
    name: str,
    token_ids: list[int],
    handoff: bool = False,
    deadline: float = float("inf"),
    priority: int = 0,
    cache_salt: str = "",
    attempt: int = 0,
    num_prompt_tokens: int | None = None,
    **sampling: Any,
) -> Sequence:
    parameters = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
    return Sequence(
        key=SequenceKey(name, attempt),
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=Sampling(**parameters),
        deadline=deadline,
        priority=priority,
        cache_salt=cache_salt,
        handoff=handoff,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB_SIZE - 1, (length,), generator=generator).tolist()


def run(engine: Engine, max_steps: int = 2000) -> list[StepOutput]:
    """Step until nothing is left to do."""
    outputs: list[StepOutput] = []
    for _ in range(max_steps):
        outputs += engine.step()
        load = engine.load()
        if load.num_waiting + load.num_running == 0:
            return outputs
    raise AssertionError(f"still busy after {max_steps} steps: {engine.load()}")


def generate(token_ids: list[int], **sampling: Any) -> list[int]:
    """What an engine to itself generates."""
    engine = make_engine(enable_prefix_caching=False, num_blocks=256, max_num_batched_tokens=512)
    sequence = make_sequence("alone", token_ids, **sampling)
    engine.add(sequence)
    run(engine)
    return sequence.token_ids[sequence.num_prompt_tokens :]
