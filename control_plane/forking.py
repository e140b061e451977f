"""Starting workers by way of a nursery, see ``control_plane/nursery.py``; on Linux.

A worker that was forked is a child of this process like those that it has executed, whatever becomes of the
nursery. There is one nursery for all workers with the same environment.
"""

import asyncio
import ctypes
import functools
import json
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import NamedTuple

from control_plane.child import Child, Command
from control_plane.nursery import GO

_PR_SET_CHILD_SUBREAPER = 36
_LINE_BYTES = 64


class Patience(NamedTuple):
    """How long a nursery may take."""

    import_s: float = 60.0  # from its start; workers asked for meanwhile wait
    fork_s: float = 10.0  # a crowded machine may need seconds, and importing anew would need more


@dataclass(slots=True, eq=False)
class Nursery:
    """The supervisor's end. ``OSError`` from ``fork`` says that this nursery will not do it."""

    name: str
    modules: tuple[str, ...]
    clients: frozenset[str]  # names of the commands that it serves
    environment: dict[str, str]
    patience: Patience = field(default_factory=Patience)
    child: Child | None = None
    _requests: socket.socket | None = None

    async def start(self) -> Child:
        """A new process, which imports from now on."""
        self.close()
        self._requests, theirs = open_requests()
        with theirs:
            argv = nursery_argv(theirs.fileno(), self.modules)
            command = Command(self.name, argv, self.environment)
            self.child = await Child.start(command, pass_fds=(theirs.fileno(),))
        return self.child

    async def fork(self, command: Command) -> Child:
        """``command`` as a child of this process; it runs a module with ``-m``."""
        if self.child is None or self._requests is None or self.child.ended:
            raise ConnectionError("there is none")
        patience_s = max(self.patience.fork_s, self.patience.import_s - self.child.age_s)
        reading, writing = os.pipe()
        try:
            argv = command.argv[command.argv.index("-m") + 1 :]
            pid = await asyncio.to_thread(fork, self._requests, argv, writing, patience_s)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return Child(command, pid, FileIO(reading), time.monotonic(), functools.partial(exit_code, pid))

    def close(self) -> None:
        """End the process. Workers go on."""
        if self._requests is not None:
            self._requests.close()
        if self.child is not None and not self.child.ended:
            self.child.kill()


def nurseries(commands: Iterable[Command]) -> list[Nursery]:
    """For those that may be forked; none where the system cannot."""
    if not hasattr(os, "pidfd_open"):
        return []
    groups: dict[frozenset[tuple[str, str]], list[Command]] = defaultdict(list)
    for command in commands:
        if command.forkable:
            groups[frozenset(command.environment.items())].append(command)
    found = []
    for index, (environment, members) in enumerate(groups.items()):
        modules = dict.fromkeys(command.argv[command.argv.index("-m") + 1] for command in members)
        name = "nursery" if len(groups) == 1 else f"nursery-{index}"
        clients = frozenset(command.name for command in members)
        found.append(Nursery(name, tuple(modules), clients, single_threaded(dict(environment))))
    return found


def single_threaded(environment: dict[str, str]) -> dict[str, str]:
    """OpenBLAS starts its threads when it is loaded, which is NumPy's, with which workers do no algebra."""
    return environment | {"OPENBLAS_NUM_THREADS": "1"}


def open_requests() -> tuple[socket.socket, socket.socket]:
    """The supervisor's end, and the nursery's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def nursery_argv(requests: int, modules: Sequence[str]) -> tuple[str, ...]:
    """Of a nursery whose workers are children of this process."""
    python = (sys.executable, "-P", "-m", "control_plane.nursery")
    return (*python, str(requests), str(os.getpid()), *modules)


def fork(requests: socket.socket, argv: Sequence[str], output: int, patience_s: float) -> int:
    """The pid of a new child of this process that runs ``argv``, a module and its arguments, and writes to
    the descriptor ``output``. ``OSError`` when that was not done within ``patience_s``; then it is not done
    later either."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            requests.settimeout(patience_s)
            socket.send_fds(requests, [json.dumps(argv).encode()], [output, theirs.fileno()])
        ours.settimeout(patience_s)
        pid = int(_heard(ours))
        try:
            ours.sendall(GO)
            _heard(ours)
        except OSError:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
    return pid


def _heard(line: socket.socket) -> bytes:
    text = line.recv(_LINE_BYTES)
    if not text:
        raise ConnectionError("it ended")
    return text


def adopt_orphans() -> None:
    """From now on processes whose parent ends, and whose forebear this one is, become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def exit_code(pid: int) -> int:
    """Waits for the end of a child of this process; negative: the signal."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)  # noqa: ASYNC222 (it has ended)
    return os.waitstatus_to_exitcode(status)


def reap(group: int) -> bool:
    """Let go of children of this process in a process group that have ended; whether all of them have."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False
