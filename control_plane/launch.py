"""Turns into another program that dies with the process that started it.

``launch.py PARENT_PID PROGRAM ...``, run by path: it imports little and takes a few milliseconds. The
kernel's promise (``PR_SET_PDEATHSIG``) survives ``exec`` and holds even if the parent is killed with -9.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    die_with(int(arguments[0]))
    os.execv(arguments[1], arguments[1:])


def die_with(parent: int) -> None:
    """Be killed when ``parent`` ends; exits if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the promise was given
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
