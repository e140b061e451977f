from itertools import islice, pairwise

from benchmarks.serve.arrivals import OpenLoop
from benchmarks.serve.traces import Recorded
from benchmarks.serve.workload import FIRST_TOKEN_ID, WORDS, Lengths, Shape, planned, replayed


def shape(**changes: object) -> Shape:
    fields: dict[str, object] = {"content": "ids", "prompt": Lengths(40), "output": Lengths(8)}
    return Shape(**(fields | changes))  # type: ignore[arg-type]


def test_prompts_of_ids_have_the_length_asked_for_and_differ() -> None:
    some = list(islice(planned(shape(), 1), 20))
    assert all(len(one.prompt) == one.num_prompt_tokens == 40 and one.max_tokens == 8 for one in some)
    assert len({tuple(one.prompt) for one in some}) == 20
    assert all(FIRST_TOKEN_ID <= int(token) < 30_000 for one in some for token in one.prompt)


def test_the_seed_makes_the_requests() -> None:
    assert list(islice(planned(shape(), 1), 5)) == list(islice(planned(shape(), 1), 5))
    assert list(islice(planned(shape(), 1), 5)) != list(islice(planned(shape(), 2), 5))


def test_lengths_spread_around_their_mean() -> None:
    some = list(islice(planned(shape(prompt=Lengths(100, 0.5), output=Lengths(10, 0.2)), 1), 300))
    lengths = [one.num_prompt_tokens for one in some]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert {one.max_tokens for one in some} == {8, 9, 10, 11, 12}


def test_text_has_a_word_for_each_token() -> None:
    prompt = next(planned(shape(content="text"), 1)).prompt
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 40 and set(prompt.split()) <= set(WORDS)


def test_prompts_share_as_many_beginnings_as_asked_for() -> None:
    some = [one.prompt for one in islice(planned(shape(prefix_tokens=30, prefixes=3), 1), 60)]
    assert len({tuple(prompt[:30]) for prompt in some}) == 3
    assert len({tuple(prompt[30:]) for prompt in some}) == 60


def test_a_replayed_trace_shares_its_blocks_at_any_scale() -> None:
    trace = [Recorded(0.0, 1000, 40, (1, 2), 512), Recorded(1.0, 1024, 2, (1, 3), 512), Recorded(2.0, 90, 0)]
    first, second, third = replayed(shape(), trace, 4, seed=1)
    assert (first.num_prompt_tokens, len(first.prompt), first.max_tokens) == (250, 250, 10)
    assert (len(second.prompt), len(third.prompt), third.max_tokens) == (256, 22, 1)
    assert first.prompt[:128] == second.prompt[:128]
    assert first.prompt[128:] != second.prompt[128:250]


def test_open_loop_arrivals_have_the_rate_asked_for() -> None:
    poisson = list(islice(OpenLoop(50.0).times(1), 5001))
    assert 90 < poisson[-1] < 110
    gaps = [later - sooner for sooner, later in pairwise(poisson)]
    assert 0.3 < sum(gap < 0.01 for gap in gaps) / len(gaps) < 0.5  # 39 % of exponential gaps are below half
    assert list(islice(OpenLoop(4.0, "constant").times(1), 3)) == [0.0, 0.25, 0.5]
    assert list(islice(OpenLoop(4.0, "burst").times(1), 3)) == [0.0, 0.0, 0.0]
