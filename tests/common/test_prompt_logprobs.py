from typing import Any

import pytest
import torch

from common.engine import Engine
from common.outputs import tokens_of
from common.sequence import Sequence
from tests.common.test_engine import output_of
from tests.common.toy import ToyModel, make_engine, make_sequence, prompt, run


def expected(token_ids: list[int]) -> list[float]:
    """One prompt at a time: what the model would put on each next token."""
    found = []
    for end in range(1, len(token_ids)):
        engine = make_engine()
        sequence = make_sequence(
            "x", token_ids[:end], max_tokens=1, num_logprobs=0, logit_bias={token_ids[end]: 1e5}
        )
        engine.add(sequence)
        (logprob,) = [logprob for output in run(engine) for logprob in output.logprobs]
        assert logprob.token_id == token_ids[end]
        found.append(logprob.logprob)
    return found


def told(engine: Engine, sequence: Sequence) -> list[float]:
    engine.add(sequence)
    outputs = []
    while engine.load().num_running + engine.load().num_waiting:
        outputs += [tokens_of(output) for output in engine.step() if output.token_ids]
    assert all(not tokens.prompt_logprobs for tokens in outputs[1:])
    return [logprob.logprob for logprob in outputs[0].prompt_logprobs]


@pytest.mark.parametrize("max_num_batched_tokens", [3, 16, 512])
def test_every_prompt_token_but_the_first_has_its_logprob(max_num_batched_tokens: int) -> None:
    token_ids = prompt(41)
    engine = make_engine(max_num_batched_tokens=max_num_batched_tokens)
    sequence = make_sequence("r", token_ids, max_tokens=2, num_prompt_logprobs=3)
    assert told(engine, sequence) == pytest.approx(expected(token_ids), abs=1e-4)
    assert [entry.token_id for entry in sequence.prompt_logprobs] == token_ids[1:]
    assert all(len(entry.top) == 3 for entry in sequence.prompt_logprobs)


def test_a_prompt_that_is_cached_has_them_all_the_same() -> None:
    token_ids, engine = prompt(30), make_engine()
    engine.add(make_sequence("first", token_ids))
    run(engine)
    sequence = make_sequence("second", token_ids, num_prompt_logprobs=0)
    assert told(engine, sequence) == pytest.approx(expected(token_ids), abs=1e-4)
    assert sequence.num_cached_tokens == 0


def test_they_change_no_output_and_cost_others_nothing() -> None:
    plain, asked = make_engine(), make_engine()
    token_ids = prompt(20)
    outputs = []
    cases: list[tuple[Engine, dict[str, Any]]] = [(plain, {}), (asked, {"num_prompt_logprobs": 1})]
    for engine, options in cases:
        sequence = make_sequence("r", token_ids, **options)
        other = make_sequence("other", prompt(9, 1))
        engine.add(sequence)
        engine.add(other)
        run(engine)
        assert not other.prompt_logprobs
        outputs.append((output_of(sequence), output_of(other)))
    assert outputs[0] == outputs[1]


def test_a_prompt_of_one_token_has_none() -> None:
    assert told(make_engine(), make_sequence("r", prompt(1), num_prompt_logprobs=0)) == []


def test_a_preemption_does_not_tell_them_twice() -> None:
    engine = make_engine(num_blocks=14, enable_prefix_caching=False)
    sequences = [make_sequence(f"r{i}", prompt(8, i), max_tokens=20, num_prompt_logprobs=0) for i in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    run(engine)
    assert engine.counters()["preemptions_total"] > 0
    for sequence in sequences:
        assert [entry.token_id for entry in sequence.prompt_logprobs] == sequence.token_ids[1:8]


def test_logits_are_computed_a_bounded_number_of_rows_at_a_time() -> None:
    class Counting:
        def __init__(self) -> None:
            self.toy = ToyModel()
            self.forward = self.toy.forward
            self.most = 0

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            self.most = max(self.most, len(hidden))
            return self.toy.logits(hidden)

    model = Counting()
    engine = make_engine(model, max_num_batched_tokens=512, num_blocks=128)
    told(engine, make_sequence("r", prompt(200), num_prompt_logprobs=0))
    assert model.most <= 64
