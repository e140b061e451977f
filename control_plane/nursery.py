"""``python -m control_plane.nursery``: has imported what workers import, and forks a worker when asked to.

Importing PyTorch takes longer than all else that a worker does before it serves, and what it takes in memory
is shared by those that were forked. How a worker comes into the world:

1  asked        the supervisor sends the worker's command line, the descriptor of its output and a line to it
2  forked       twice: the process between ends at once, so that the worker becomes the supervisor's own child
                and outlives this one
3  introduced   the worker dies with the supervisor from now on, tells it its pid, and waits for its word
4  on its own   a session and an output of its own; then the module runs as by ``python -m``

Nothing that would not survive it happens before a fork: there is one thread, no parallel computing has begun
and no GPU was touched. The environment is the workers' own, so that what libraries read from it when they are
loaded holds for them.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
from pathlib import Path

from control_plane.launch import die_with

MAX_REQUEST_BYTES = 1 << 17
EXIT_REFUSED = 2  # cannot fork here, and could not the next time either
GO, BORN = b"go", b"born"


def main(arguments: list[str]) -> None:
    """``arguments``: the descriptor on which requests come, the supervisor's pid, and modules with a
    ``__main__``. Returns in this process at the end of the requests, and in each worker at its end."""
    requests, supervisor, modules = socket.socket(fileno=int(arguments[0])), int(arguments[1]), arguments[2:]
    for module in modules:
        importlib.import_module(f"{module}.__main__")
        del sys.modules[f"{module}.__main__"]  # it is to run, once, in a worker
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        print(f"{count} threads run after importing {', '.join(modules)}: no place to fork", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    gc.collect()
    gc.freeze()  # the collector of a worker would write to, and so copy, every page that is shared
    argv = next_worker(requests, supervisor)
    if argv:
        rename(argv)
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def next_worker(requests: socket.socket, supervisor: int) -> list[str]:
    """Returns in each worker, with its module and arguments; in this process at the end, with nothing."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 2)
        if not request:
            return []
        between = os.fork()
        if between == 0:
            requests.close()
            leave_between()
            enter(supervisor, socket.socket(fileno=descriptors[1]), descriptors[0])
            argv: list[str] = json.loads(request)
            return argv
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)


def leave_between() -> None:
    """Returns in a child of this process, once this one has ended and the child has another parent."""
    between = os.pidfd_open(os.getpid())
    if os.fork():
        os._exit(0)
    select.select([between], [], [])
    os.close(between)


def enter(supervisor: int, line: socket.socket, output: int) -> None:
    """The worker introduces itself, and goes on alone when told to."""
    die_with(supervisor)
    with line:
        try:
            line.sendall(str(os.getpid()).encode())
            wanted = line.recv(len(GO)) == GO
        except ConnectionError:
            wanted = False
        if not wanted:  # nobody waits for it any more
            os._exit(1)
        os.setsid()  # what ends the nursery, and all that belongs to it, no longer ends this
        line.sendall(BORN)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def rename(argv: list[str]) -> None:
    """Let ``ps`` show the worker's command line in place of the nursery's, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, [sys.executable, "-m", *argv]))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main(sys.argv[1:])
