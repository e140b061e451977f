import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_figure_is_measured_and_all_tokens_arrive(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    options = ["--streams", "1,4", "--seconds", "0.5", "--output", str(output)]
    command = [sys.executable, "-m", "benchmarks.proxy", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    assert [(figure["kind"], figure["streams"]) for figure in figures] == [
        ("request", 1), ("flat out", 1), ("flat out", 4), ("paced", 1), ("paced", 4),
    ]  # fmt: skip
    for figure in figures:
        assert figure["tokens_per_s"] > 0
        assert 0 < figure["first_byte_p50_ms"] <= figure["first_byte_p99_ms"]
        assert 0 < figure["events_per_token"] <= 1
