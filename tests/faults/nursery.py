"""Worker processes that start in a tenth of a second, forked by the product's own nursery."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from control_plane import forking

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "control_plane" / "launch.py"
MODULES = ("prefill_worker", "decode_worker")
PATIENCE_S = 60.0


class Forked:
    """As much of ``subprocess.Popen`` as a cluster needs."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """``argv`` begins with ``-m`` and a module."""
        own = {name: text for name, text in environment.items() if name != "PYTEST_CURRENT_TEST"}
        self._argv = argv
        self._code: int | None = None
        with log.open("ab") as output:
            self.pid = forking.fork(nursery(frozenset(own.items()))[0], argv[1:], output.fileno(), PATIENCE_S)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            end = os.pidfd_open(self.pid)
            try:
                select.select([end], [], [], timeout)
            finally:
                os.close(end)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(list(self._argv), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@cache
def nursery(environment: frozenset[tuple[str, str]]) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """Where to ask for workers with ``environment``, and who answers; the nursery ends with this process."""
    forking.adopt_orphans()
    requests, theirs = forking.open_requests()
    with theirs:
        # Its end is noticed when it is asked, and it is this process's to reap at its own.
        process = subprocess.Popen(
            [
                *(sys.executable, "-IS", str(LAUNCH), str(os.getpid())),
                *forking.nursery_argv(theirs.fileno(), MODULES),
            ],
            env=forking.single_threaded({**dict(environment), "PYTHONPATH": str(ROOT)}),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return requests, process
