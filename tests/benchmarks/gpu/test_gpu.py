"""What ``benchmarks/gpu_check.sh`` does on a GPU, as far as it shows without one."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu_check
from benchmarks.gpu import agree, paper, serving
from benchmarks.gpu.costs import StepShape, attention, linear, step_costs
from benchmarks.gpu.models import LLAMA_1B, LLAMA_8B, TINY, RandomCheckpoint, build
from kernels import cpu

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_check_runs_in_the_interpreter(tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "ARGS": "--tiny", "PYTHON": sys.executable, "OUT": str(tmp_path)
    }  # fmt: skip
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "gpu.md").read_text()
    assert table.strip() in done.stdout
    for part in (
        "| attention, float32 |",
        "decode attention, batch 1",
        "by zmq+ipc, GB/s",
        "8B: hand-over",
        "| draw",
    ):
        assert part in table
    assert "WRONG" not in table and "FAILED" not in table


@pytest.mark.timeout(600)  # importing PyTorch takes minutes where others keep all cores busy
def test_it_needs_no_packages_but_those_that_the_script_installs() -> None:
    listed = re.search(r"for name in ([\w ]+); do", SCRIPT.read_text())
    assert listed is not None
    given = {*listed.group(1).split(), "torch", "triton", "filelock"}  # PyTorch itself needs filelock
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {re.split(r"[=\[;]", line)[0].replace("-", "_") for line in [*project["dependencies"], *extras]}
    modules = {"pyzmq": "zmq", "pyyaml": "yaml", "ucxx_cu12": "ucxx", "nvidia_ml_py": "pynvml"}
    absent = sorted({modules.get(name, name) for name in names} - given)
    assert "fastapi" in absent
    program = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import benchmarks.gpu.__main__"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=500, check=True)


def test_wheels_are_those_of_the_project() -> None:
    pins = set(re.findall(r"[a-z-]+==[\d.]+", SCRIPT.read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(pins) == 8
    assert pins <= set(project["dependencies"])


def test_what_fails_is_told_and_costs_the_other_pieces_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> Iterator[str]:
        yield "| begun |"
        raise KeyError("a bug")

    out = tmp_path / "table"
    check = gpu_check.Check(True, gpu_check.Table(out))
    assert not check.tell(iter([failing(), iter(["| another |"])]))
    assert out.read_text().splitlines() == ["| begun |", "| FAILED: KeyError: 'a bug' | |", "| another |"]
    assert "Traceback" in caplog.text


def test_parts_are_told_as_left_out_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--tiny", "--seconds", "0"]) == 1
    told = capsys.readouterr().out
    assert all(f"{part}: left out, the time is over" in told for part in gpu_check.PARTS)


def test_a_part_that_crashes_or_hangs_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes in place of parts: one crashes, one hangs, the others are done at once."""
    endings = {"kernels": "import os; os.abort()", "transfers": "import time; time.sleep(600)"}
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.0)
    monkeypatch.setattr(
        gpu_check, "command_of", lambda part, argv: [sys.executable, "-c", endings.get(part, "")]
    )
    out = tmp_path / "table"
    assert gpu_check.main(["--tiny", "--seconds", "20", "--out", str(out)]) == 1
    told = out.read_text()
    assert "kernels: FAILED, the process ended with -6" in told
    assert re.search(r"transfers: not done in \d+ s", told)
    assert "agreement" not in told and "model" not in told  # nothing to tell of them


def test_what_is_too_far_apart_is_told() -> None:
    expected = torch.tensor([1.0, 100.0])
    assert agree.share_of_tolerance(expected + torch.tensor([0.0, 0.5]), expected, 0.01) < 1
    assert agree.share_of_tolerance(expected + torch.tensor([0.05, 0.0]), expected, 0.01) > 1
    assert agree.share_of_tolerance(torch.tensor([1.0, torch.nan]), expected, 0.01) == torch.inf


def test_an_engine_is_timed_and_handed_over_from() -> None:
    model = build(TINY, cpu, torch.float32, CPU)
    load = serving.Load(prompt_tokens=20, batches=(1, 3), context=10, steps=2)
    rows = [row for piece in serving.pieces("tiny", model, load, is_gpu=False) for row in piece]
    assert [row.split("|")[1].strip() for row in rows] == [
        "tiny: prefill of 20 tokens, tokens/s",
        "tiny: hand-over of 10 tokens, ms",
        "tiny: hand-over, GB/s",
        "tiny: TPOT at batch 1, ms, launched one by one",
        "tiny: TPOT at batch 3, ms, launched one by one",
        "tiny: TPOT while blocks are read, of that while none are",
        "tiny: read meanwhile, GB/s",
    ]
    moved = serving.hand_over(model, load)
    assert moved.is_right
    assert moved.num_bytes == 1 * 2 * TINY.num_layers * TINY.num_kv_heads * 16 * TINY.head_dim * 4


def test_an_engine_whose_steps_fail_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    model = build(TINY, cpu, torch.float32, CPU)
    monkeypatch.setattr(model, "forward", fail)
    load = serving.Load(prompt_tokens=20, batches=(2,), context=10, steps=2)
    for rows in serving.pieces("tiny", model, load, is_gpu=False):
        with pytest.raises(RuntimeError, match="a step failed"):
            list(rows)


def test_random_weights_are_the_same_each_time() -> None:
    first, second = (torch.empty(TINY.vocab_size, TINY.hidden_size) for _ in range(2))
    for target in (first, second):
        RandomCheckpoint(TINY).read_into("model.embed_tokens.weight", target)
    assert torch.equal(first, second)
    assert 0.5 < float(first.std()) * TINY.hidden_size**0.5 < 1.5


def test_costs_are_those_of_the_textbook() -> None:
    product = linear("", rows=3, inputs=10, outputs=20)
    assert (product.num_bytes, product.flops) == (2 * (200 + 3 * 30), 2 * 3 * 200)
    decode = attention("", LLAMA_8B, StepShape(2, 1, 100))
    assert decode.flops == 2 * 100 * 4 * 4096
    assert decode.num_bytes == 2 * 100 * 2 * 1024 * 2 + 2 * 2 * 4096 * 2
    whole = attention("", LLAMA_8B, StepShape(1, 100, 100))
    assert whole.flops == 4 * 4096 * sum(range(1, 101))  # each token sees itself and those before it


def test_a_decode_step_reads_every_weight_once() -> None:
    costs = step_costs(LLAMA_8B, StepShape(1, 1, 1))
    weights = 8.03e9 - 128_256 * 4096  # the embedding is looked up
    assert sum(cost.num_bytes for cost in costs) == pytest.approx(2 * weights, rel=0.01)
    assert sum(cost.flops for cost in costs) == pytest.approx(2 * weights, rel=0.01)


def test_the_tables_name_what_binds() -> None:
    decode = paper.table("decode", StepShape(1, 1, 2048))
    prefill = paper.table("prefill", StepShape(1, 2048, 2048))
    assert re.search(r"\| gate and up \|.*\| memory \|", decode)
    assert re.search(r"\| gate and up \|.*\| arithmetic \|", prefill)
    assert LLAMA_1B.num_layers == 16


def test_a_hand_over_is_counted_in_bytes_and_as_a_share_of_prefill() -> None:
    table = paper.hand_over_table(2048)
    assert "| hand-over, 2,048 tokens, 268 MB |" in table
    (row,) = [line for line in table.splitlines() if line.startswith("| PCIe 5 x16 | 4.2 | ")]
    assert 0.1 < float(row.split("|")[3].strip().removesuffix("%")) / 100 < 0.2
