"""Cluster files that are examples must be what ``baton serve`` takes."""

from pathlib import Path

import pytest

from common.config import ConfigError
from control_plane import deployment
from control_plane.commands import commands

CLUSTERS = Path(__file__).parents[2] / "deploy" / "clusters"
EXPECTED = {
    "laptop": (1, 1),
    "one-gpu": (1, 1),
    "eight-gpus": (2, 6),
    "two-racks": (1, 1),
}


def read(name: str, num_gpus: int = 8) -> deployment.Deployment:
    return deployment.read(["--config", str(CLUSTERS / f"{name}.yaml")], {}, num_gpus)


def test_every_example_is_looked_at() -> None:
    assert {path.stem for path in CLUSTERS.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize(("name", "counts"), EXPECTED.items())
def test_an_example_starts_the_workers_it_speaks_of(name: str, counts: tuple[int, int]) -> None:
    found = {group.role: group.count for group in read(name).workers}
    assert (found["prefill"], found["decode"]) == counts


@pytest.mark.parametrize("numbers", ["decode: 0", "decode: {workers: 0}", "prefill: -1", "proxy-workers: 0"])
def test_numbers_of_workers_that_cannot_serve_are_refused(tmp_path: Path, numbers: str) -> None:
    (tmp_path / "cluster.yaml").write_text(numbers)
    with pytest.raises(ConfigError, match=numbers.partition(":")[0]):
        deployment.read(["--config", str(tmp_path / "cluster.yaml")], {}, 0)


def test_eight_workers_get_a_gpu_each() -> None:
    devices = [
        word for command in commands(read("eight-gpus"), {}) for word in command.argv if "--device" in word
    ]
    assert sorted(devices[1:]) == [f"--device=cuda:{number}" for number in range(8)]


def test_roles_are_configured_apart() -> None:
    groups = {group.role: group for group in read("eight-gpus").workers}
    assert groups["prefill"].engine.max_num_batched_tokens > groups["decode"].engine.max_num_batched_tokens
    assert groups["decode"].engine.max_num_seqs > groups["prefill"].engine.max_num_seqs


def test_the_racks_share_a_secret_and_both_proxies() -> None:
    racks = read("two-racks")
    assert racks.network.secret_file == "baton.secret"
    assert all(len(group.worker.proxies) == 2 for group in racks.workers)
