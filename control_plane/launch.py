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
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(arguments[0]):  # it died before the promise was given
        sys.exit(1)
    os.execv(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
