"""``python -m tests.netns.inside NAMESPACE MODULE ...``: ``python -m MODULE ...`` in a network namespace.

In this process rather than by ``ip netns exec``: a worker that was forked with PyTorch imported can go there,
too. Before any thread is started: a namespace is a thread's, and new threads inherit it."""

import ctypes
import os
import runpy
import sys

from tests.netns.network import NAMESPACES

CLONE_NEWNET = 0x40000000


def main() -> None:
    namespace, module = sys.argv[1:3]
    enter(namespace)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def enter(namespace: str) -> None:
    descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


if __name__ == "__main__":
    main()
