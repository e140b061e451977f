import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine import Engine
from common.sequence import Sequence, State
from tests.faults import tiny_model
from tests.faults.client import Reply, Verdict, judge
from tests.faults.oracle import Case, Oracle, Reference, sequence_of, single_process_engine

Damage = Callable[[list[memoryview]], None]
LENGTHS = (1, 15, 16, 17, 100, 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return single_process_engine(str(model))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(256) for _ in range(length))


def generate(engine: Engine, case: Case, damage: Damage | None = None) -> list[int]:
    """``damage`` is done to the blocks of the prompt once the first token is out."""
    sequence = sequence_of(case, "0")
    engine.add(sequence)
    while not ended(sequence):
        engine.step()
        # Damage may end the sequence at once: what the model says is not finite then.
        if damage is not None and sequence.num_output_tokens == 1 and not ended(sequence):
            damage([engine.cache.views([block_id])[0] for block_id in sequence.block_ids])
    return sequence.token_ids[len(case.prompt) :]


def ended(sequence: Sequence) -> bool:
    return sequence.state is State.FINISHED


def invert_a_bit(blocks: list[memoryview]) -> None:
    blocks[0][3] ^= 0x40


def leave_a_block_out(blocks: list[memoryview]) -> None:
    blocks[2][:] = bytes(len(blocks[2]))


def take_the_wrong_block(blocks: list[memoryview]) -> None:
    blocks[2][:] = blocks[0]


def test_answers_do_not_depend_on_what_is_computed_along_with_them(model: Path) -> None:
    cases = [Case(prompt(n, n), 12, temperature=t, seed=n) for n in LENGTHS for t in (0.0, 1.0)]
    together = Oracle(model).references(cases)
    alone = Oracle(model)
    assert [alone.reference(case).token_ids for case in cases] == [r.token_ids for r in together]


def test_margins_of_the_tiny_model_are_wide(model: Path) -> None:
    references = Oracle(model).references([Case(prompt(n, n), 32) for n in LENGTHS])
    gaps = [gap for reference in references for gap in reference.gaps]
    assert sum(gap < 1e-3 for gap in gaps) <= len(gaps) // 100
    assert sorted(gaps)[len(gaps) // 2] > 0.5


@pytest.mark.parametrize(
    ("damage", "at_least"), [(invert_a_bit, 4), (leave_a_block_out, 9), (take_the_wrong_block, 9)]
)
def test_damage_to_the_cache_changes_what_the_tiny_model_says(
    engine: Engine, damage: Damage, at_least: int
) -> None:
    cases = [Case(prompt(100, seed), 32) for seed in range(10)]
    assert sum(generate(engine, case) != generate(engine, case, damage) for case in cases) >= at_least


def test_models_of_two_seeds_say_different_things(model: Path, tmp_path: Path) -> None:
    case = Case(prompt(40), 8)
    other = Oracle(tiny_model.write(tmp_path, seed=1))
    assert other.reference(case).token_ids != Oracle(model).reference(case).token_ids


def test_the_model_is_the_same_wherever_it_is_made(model: Path, tmp_path: Path) -> None:
    again = tiny_model.write(tmp_path)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (model / name).read_bytes()
    assert torch.get_default_dtype() is torch.float32


REFERENCE = Reference((1, 2, 3), (1.0, 1e-4, 1.0))


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (Reply(200, [1, 2, 3], finish_reason="length"), Verdict.EQUAL),
        (Reply(200, [1, 9, 9], finish_reason="length"), Verdict.EQUAL),  # left it at a near tie
        (Reply(200, [9, 2, 3], finish_reason="length"), Verdict.WRONG),
        (Reply(200, [1, 2], finish_reason="length"), Verdict.WRONG),
        (Reply(200, [1, 2, 3, 4], finish_reason="length"), Verdict.WRONG),
        (Reply(200, [], finish_reason="stop"), Verdict.WRONG),
        (Reply(200, [1, 2]), Verdict.WRONG),  # ended without a reason
        (Reply(200, [1, 2], error="worker lost"), Verdict.ERROR),
        (Reply(200, [9], error="worker lost"), Verdict.WRONG),
        (Reply(503, error="no worker"), Verdict.ERROR),
        (Reply(200, [1], error="nothing came", hung=True), Verdict.HUNG),
    ],
)
def test_replies_are_equal_or_errors_or_else_wrong(reply: Reply, verdict: Verdict) -> None:
    assert judge(reply, REFERENCE) is verdict
