import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import cores
from common.config import ConfigError


@given(count=st.integers(1, 64), num_workers=st.integers(1, 80))
def test_every_worker_has_cores_and_shares_them_only_when_there_are_too_few(
    count: int, num_workers: int
) -> None:
    available = tuple(range(100, 100 + count))
    shares = cores.split(available, num_workers)
    assert len(shares) == num_workers
    assert all(shares)
    used = [core for share in shares for core in share]
    assert set(used) == set(available[: max(len(available), num_workers)])
    if num_workers <= count:
        assert len(used) == len(set(used)) == count
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_of_two_cores_each_of_two_workers_gets_one() -> None:
    assert cores.split((0, 1), 2) == [(0,), (1,)]
    assert cores.split((0, 1), 1) == [(0, 1)]


def test_a_pinned_process_runs_there_and_sizes_its_thread_pools_to_it() -> None:
    core = cores.allowed()[0]
    program = (
        "import os; from common import cores\n"
        f"print(cores.pin(({core},)), cores.allowed(), os.environ['OMP_NUM_THREADS'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == f"1 ({core},) 1"


def test_cores_that_the_process_may_not_use_are_refused_by_name() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="--cores: this process may not use 4711"):
        cores.pin((4711,))
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(cores.allowed()) < 2, reason="needs two cores")
def test_processes_on_the_same_cores_have_one_seat_and_others_another() -> None:
    def seat_of(own: tuple[int, ...]) -> str:
        program = f"import os; os.sched_setaffinity(0, {own}); from common import cores; print(cores.seat())"
        return subprocess.check_output([sys.executable, "-c", program], text=True).strip()

    first, second = cores.allowed()[:2]
    assert seat_of((first, second)) == seat_of((second, first))
    assert len({seat_of((first,)), seat_of((second,)), seat_of((first, second)), ""}) == 4
