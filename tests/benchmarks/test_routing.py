import json
import random
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.routing_simulation import Simulation, Speeds, Turn, best_hit_rate
from benchmarks.serve import traces
from proxy.router import Router

SPEEDS = Speeds(tokens_per_s=1000.0, step_s=0.01)


def conversations(path: Path, count: int = 20, num_turns: int = 6) -> Path:
    """Each turn repeats all of the turns before it."""
    rng = random.Random(3)
    lines = []
    for number in range(count):
        for turn in range(1, num_turns + 1):
            ids = [0, *range(100 * number + 1, 100 * number + 4 * turn)]
            at_ms = round(1000 * (10 * turn + rng.random() * 10))
            lines.append(
                {"timestamp": at_ms, "input_length": 512 * len(ids), "output_length": 160, "hash_ids": ids}
            )
    lines.sort(key=lambda line: int(str(line["timestamp"])))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_knowing_the_caches_finds_more_in_them_and_answers_sooner(tmp_path: Path) -> None:
    trace = traces.read(conversations(tmp_path / "trace.jsonl"))
    turns = routing.turns_of(trace, divisor=16, num_prefill=2, load=0.8, speeds=SPEEDS)
    results = {
        policy: Simulation(Router(policy, policy, "always"), 2, 10_000, SPEEDS).run(turns)
        for policy in ("round_robin", "prefix_aware", "cost")
    }
    best = best_hit_rate(turns)
    for policy in ("prefix_aware", "cost"):
        assert results["round_robin"].hit_rate < results[policy].hit_rate <= best
        assert results[policy].mean_s < results["round_robin"].mean_s


def test_lengths_times_and_shared_blocks_are_scaled_together(tmp_path: Path) -> None:
    trace = traces.read(conversations(tmp_path / "trace.jsonl"))
    turns = routing.turns_of(trace, divisor=16, num_prefill=2, load=0.5, speeds=SPEEDS)
    busy_s = sum(turn.num_tokens for turn in turns) / SPEEDS.tokens_per_s / 2
    assert abs(busy_s / turns[-1].at_s - 0.5) < 1e-6
    first = turns[0]
    assert (first.num_tokens, len(first.hashes)) == (4 * 32, 8)
    assert len({turn.hashes[:2] for turn in turns}) == 1


def test_one_worker_of_each_role_finds_all_that_can_be_found() -> None:
    names = [number.to_bytes(16) for number in range(8)]
    turns = [Turn(10.0 * i, tuple(names[: 2 * i]), 32 * i + 1, 1) for i in range(1, 5)]
    found = Simulation(Router("round_robin", "round_robin", "always"), 1, 100, SPEEDS).run(turns)
    assert found.hit_rate == best_hit_rate(turns) > 0.5


def test_the_tables_name_every_policy_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = conversations(tmp_path / "trace.jsonl", count=3)
    assert routing.main(["simulate", str(path), "--requests", "12"]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {policy} |" in printed for policy in ("round_robin", "prefix_aware", "cost"))
    decision = routing.Decision(50.0, 100.0, 2**20)
    assert "| cost | 50 | 100 | 150 |" in routing.decision_table({"cost": decision})
