import json
from pathlib import Path

from benchmarks.routing_modes import Row, verdict
from benchmarks.routing_replay import best_hit_rate, conversations, fitted, pieces
from benchmarks.serve.client import Outcome
from benchmarks.serve.figures import Targets, figures
from benchmarks.serve.generator import Run
from benchmarks.serve.traces import Recorded
from benchmarks.serve.workload import Planned


def line(at_ms: int, ids: list[int], num_tokens: int) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": num_tokens, "output_length": 5, "hash_ids": ids})


def test_takes_whole_conversations_and_fits_them_into_the_time(tmp_path: Path) -> None:
    lines = [line(1000 * turn, [0, 1, *range(10, 10 + turn)], 512 * (turn + 2)) for turn in range(5)]
    lines += [line(100, [0, 2], 900), line(300, [0, 2, 3], 1400)]  # two turns: too few
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    chosen = conversations(path, num_turns=6)
    assert [one.num_prompt_tokens for one in chosen] == [512 * (turn + 2) for turn in range(5)]
    assert fitted(chosen, span_s=2.0) == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_the_best_hit_rate_is_that_of_a_cache_that_forgets_nothing() -> None:
    first = Recorded(0.0, 1000, 1, (0, 1), 512)
    again = Recorded(1.0, 1500, 1, (0, 1, 2), 512)
    other = Recorded(2.0, 500, 1, (7,), 512)
    assert best_hit_rate([first, other, again]) == (512 + 512) / 3000


def test_pieces_hold_every_request_once_and_keep_their_distances() -> None:
    requests = [Planned([index], 1, 1) for index in range(5)]
    found = list(pieces([0.0, 1.0, 2.5, 3.0, 4.0], requests, 2))
    assert [[due.at_s for due in piece] for piece in found] == [[0.0, 1.0], [0.5, 1.0, 2.0]]
    assert [due.planned for piece in found for due in piece] == requests


def row(mode: str, num_good: tuple[int, ...]) -> Row:
    outcomes = [Outcome(0.0, sent_at=0.0, token_times=[0.1], num_output_tokens=1)]
    return Row("w", 10.0, mode, figures(Run(outcomes, wall_s=1.0), Targets()), num_good, sum(num_good), 0.5)


def test_auto_must_keep_up_with_the_better_of_the_others() -> None:
    steady = (20, 20, 20, 20)
    assert verdict([row("auto", (20, 19, 20, 20)), row("always", steady), row("never", (9, 9, 9, 9))], "w")[1]
    text, kept = verdict(
        [row("auto", (18, 17, 18, 17)), row("always", (5, 5, 5, 5)), row("never", steady)], "w"
    )
    assert not kept
    assert "0.875" in text and "never" in text and "FAIL" in text
    none = (0, 0, 0, 0)
    assert not verdict([row("auto", none), row("always", none), row("never", none)], "w")[1]


def test_turns_that_differ_much_show_nothing() -> None:
    rows = [row("auto", (30, 2, 25, 23)), row("always", (20, 20, 20, 20)), row("never", (1, 1, 1, 1))]
    text, kept = verdict(rows, "w")
    assert not kept
    assert "not shown" in text
