"""Which CPU cores a process runs on.

Two workers whose thread pools share cores wait for each other at every step and run many times slower than
alone, so each worker gets cores of its own: its ``cores`` option.
"""

import os
from itertools import pairwise
from pathlib import Path

from common.config import ConfigError

# What libraries read when they are first imported to size their thread pools.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def allowed() -> tuple[int, ...]:
    """The cores that this process may use, hardware threads of one physical core next to each other."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0), key=lambda core: (_physical(core), core)))


def _physical(core: int) -> tuple[int, int]:
    """(package, core) as the kernel counts them; (0, number) where it does not say."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package = int((topology / "physical_package_id").read_text())
        return package, int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, core


def split(cores: tuple[int, ...], num_workers: int) -> list[tuple[int, ...]]:
    """Cores for each worker: neighbours, as evenly as it goes, the first ones getting what is left over. With
    fewer cores than workers each has one, shared in turn."""
    if num_workers >= len(cores):
        return [(cores[index % len(cores)],) for index in range(num_workers)]
    share, left_over = divmod(len(cores), num_workers)
    bounds = [index * share + min(index, left_over) for index in range(num_workers + 1)]
    return [cores[start:end] for start, end in pairwise(bounds)]


def pin(cores: tuple[int, ...]) -> int:
    """Keep this process, and threads it starts later, on ``cores`` (none: where it may run already), and
    tell numeric libraries not yet imported to use as many threads. Returns that number; ConfigError names
    cores that the process may not use."""
    chosen = cores or allowed()
    missing = set(chosen) - set(allowed())
    if missing:
        raise ConfigError(f"--cores: this process may not use {', '.join(map(str, sorted(missing)))}")
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    os.environ.update(thread_variables(len(chosen)))
    return len(chosen)


def seat() -> str:
    """A name of the cores that this process may use, on this machine: equal in processes that share them all.
    Empty where the machine cannot be told from others."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return f"{machine} {','.join(map(str, sorted(allowed())))}"


def thread_variables(num_threads: int) -> dict[str, str]:
    """Environment variables by which numeric libraries start ``num_threads`` threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(num_threads))
