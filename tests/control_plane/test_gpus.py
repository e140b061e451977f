from pathlib import Path

import pytest

from control_plane import deployment, gpus
from control_plane.commands import commands as build_commands

TWO = "echo 'GPU 0: one (UUID: a)'; echo 'GPU 1: two (UUID: b)'"


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 2), ("", 0), ("1", 1), ("0,1", 2), ("-1", 0), ("GPU-a", 1), ("0,1,2", 2)]
)
def test_counts_what_cuda_would_see(visible: str | None, expected: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus.count(environment, ("sh", "-c", TWO)) == expected


def test_without_a_working_driver_there_are_none(tmp_path: Path) -> None:
    assert gpus.count({}, (str(tmp_path / "nvidia-smi"),)) == 0
    assert gpus.count({}, ("sh", "-c", "echo 'GPU 0: gone'; exit 9")) == 0


def test_workers_take_turns_on_the_gpus() -> None:
    def devices(*argv: str, num_gpus: int) -> list[str]:
        commands = build_commands(deployment.read(argv, {}, num_gpus), {})
        return [word.removeprefix("--device=") for c in commands for word in c.argv if "--device=" in word]

    assert devices("--prefill=2", num_gpus=2) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices(num_gpus=1) == ["cuda:0", "cuda:0"]
    assert devices(num_gpus=0) == []
    assert devices("--device=cpu", num_gpus=2) == ["cpu"] * 3  # the proxy is told too, and does not mind


def test_workers_on_one_gpu_divide_its_memory() -> None:
    def shares(*argv: str, num_gpus: int) -> list[str]:
        name = "--gpu-memory-utilization="
        commands = build_commands(deployment.read(argv, {}, num_gpus), {})
        workers = [command for command in commands if "_worker" in " ".join(command.argv)]
        return [
            next((word.removeprefix(name) for word in command.argv if name in word), "")
            for command in workers
        ]

    assert shares(num_gpus=1) == ["0.45", "0.45"]
    assert shares(num_gpus=2) == ["", ""]  # the default
    assert shares("--decode=2", "--gpu-memory-utilization=0.8", num_gpus=2) == ["0.4", "0.8", "0.4"]
    assert shares(num_gpus=0) == ["", ""]
