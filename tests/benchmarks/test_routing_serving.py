import json
from pathlib import Path

from benchmarks.routing_serving import best_hit_rate, conversations
from benchmarks.serve import traces


def line(at_ms: int, ids: list[int], num_tokens: int) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": num_tokens, "output_length": 5, "hash_ids": ids})


def test_takes_whole_conversations_and_fits_them_into_the_time(tmp_path: Path) -> None:
    lines = [line(1000 * turn, [0, 1, *range(10, 10 + turn)], 512 * (turn + 2)) for turn in range(5)]
    lines += [line(100, [0, 2], 900), line(300, [0, 2, 3], 1400)]  # two turns: too few
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    chosen = conversations(path, num_turns=6, span_s=2.0)
    assert len(chosen) == 5
    assert [one["timestamp"] for one in chosen] == [0, 500, 1000, 1500, 2000]
    again = tmp_path / "again.jsonl"
    again.write_text("\n".join(map(json.dumps, chosen)))
    assert [one.num_prompt_tokens for one in traces.read(again)] == [512 * (turn + 2) for turn in range(5)]


def test_the_best_hit_rate_is_that_of_a_cache_that_forgets_nothing() -> None:
    first = {"input_length": 1000, "hash_ids": (0, 1)}
    again = {"input_length": 1500, "hash_ids": (0, 1, 2)}
    other = {"input_length": 500, "hash_ids": (7,)}
    assert best_hit_rate([first, other, again]) == (512 + 512) / 3000
