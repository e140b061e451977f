"""Worker processes that start in a tenth of a second: forked from one that has imported what workers import.

What they run is what ``python -m`` runs. Each gets a session, a log and an environment of its own, and dies
with the process that forked it, which dies with the tests.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import TimeoutExpired

PR_SET_PDEATHSIG = 1
PRELOADED = [
    "common.startup",
    "common.engine",
    "common.model",
    "kernels.cpu",
    "kernels.native",
    "kv_transfer.zmq",
]


class Forked:
    """As much of ``subprocess.Popen`` as a cluster needs."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """``argv`` begins with ``-m`` and a module."""
        self._argv = argv
        self._process = server().Process(target=become, args=(list(argv), dict(environment), str(log)))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(list(self._argv), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def become(argv: list[str], environment: dict[str, str], log: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv[1:]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
