"""Recorded steps, with a recorder that computes anew at each replay, from the same places."""

import pytest
from torch import Tensor

from common.batch import build
from common.graphs import RecordedModel, Step, sizes, warm_up
from common.sampler import PLAIN
from common.scheduler import Work
from kernels import AttentionBatch
from tests.common.toy import MAX_MODEL_LEN, ToyModel, generate, make_engine, make_sequence, prompt, run


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 4]),
        (20, [1, 2, 4, 8, 12, 16, 24]),
        (64, [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]),
    ],
)
def test_few_sizes_reach_up_to_any_number(most: int, expected: list[int]) -> None:
    assert sizes(most) == expected


class Tape:
    """Counts what is recorded and replayed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replayed: list[int] = []

    def record(self, step: Step) -> Step:
        size = len(step())
        self.sizes.append(size)

        def replay() -> Tensor:
            self.replayed.append(size)
            return step()

        return replay


class Watched:
    """A toy model that also notes which slots it was asked to write."""

    def __init__(self) -> None:
        self.toy = ToyModel()
        self.slots: set[int] = set()
        self.rows: list[int] = []

    def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: list[Tensor]) -> Tensor:
        self.rows.append(len(token_ids))
        self.slots.update(batch.slots.tolist())
        return self.toy.forward(token_ids, batch, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.toy.logits(hidden)


def test_sequences_get_their_tokens_from_records_of_the_next_larger_size() -> None:
    tape, model = Tape(), Watched()
    engine = make_engine(num_blocks=64, staged=True)
    cache = engine.cache
    engine._language_model = RecordedModel(model, cache.layers, 64, 5, MAX_MODEL_LEN, tape.record)
    assert tape.sizes == [8, 4, 2, 1]
    prompts = [prompt(length, seed=length) for length in (3, 9, 1, 20, 6)]
    sequences = [make_sequence(f"r{i}", tokens, max_tokens=4 + i) for i, tokens in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    run(engine)
    for i, (sequence, tokens) in enumerate(zip(sequences, prompts, strict=True)):
        assert sequence.token_ids[len(tokens) :] == generate(tokens, max_tokens=4 + i)
    assert set(tape.replayed) == {8, 4, 2, 1}  # as one after the other ends
    assert max(model.slots) == 64 * cache.layout.block_size  # the spare block's first, and nothing behind it


def test_of_a_record_only_the_rows_that_are_asked_for_come_back() -> None:
    tape, engine = Tape(), make_engine(num_blocks=64, staged=True)
    cache = engine.cache
    model = RecordedModel(ToyModel(), cache.layers, 64, 4, MAX_MODEL_LEN, tape.record)
    first, second = make_sequence("a", prompt(1, 1)), make_sequence("b", prompt(3, 2))
    first.block_ids, second.block_ids = [0], [1]
    batch = build([Work(second, 0, 1, False), Work(first, 0, 1, True)], cache.layout.block_size, cache.device)
    hidden = model.forward(batch.token_ids, batch.attention, cache.layers)
    expected = ToyModel().forward(batch.token_ids, batch.attention, cache.layers)
    assert tape.replayed == [2] and hidden.shape == expected.shape == (1, expected.shape[1])
    assert hidden.equal(expected)


def test_warming_up_computes_prompts_and_mixed_steps_in_the_spare_block_alone() -> None:
    engine, model = make_engine(num_blocks=8, staged=True), Watched()
    warm_up(model, engine.cache.layers, 8, 70, 5, PLAIN)
    size = engine.cache.layout.block_size
    assert model.rows == [70, 64, 2, 3, 5, 9]  # as many sequences as records have, one with two new tokens
    assert model.slots == set(range(8 * size, 9 * size))
    assert not engine.cache.data[:8].any()


def test_more_sequences_than_were_recorded_are_computed_one_launch_after_the_other() -> None:
    tape = Tape()
    engine = make_engine(num_blocks=64, staged=True)
    engine._language_model = RecordedModel(ToyModel(), engine.cache.layers, 64, 2, MAX_MODEL_LEN, tape.record)
    prompts = [prompt(4, seed) for seed in range(3)]
    sequences = [make_sequence(f"r{seed}", tokens, max_tokens=5) for seed, tokens in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    run(engine)
    assert [s.token_ids[4:] for s in sequences] == [generate(tokens, max_tokens=5) for tokens in prompts]
    assert tape.replayed == []
