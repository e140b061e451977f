"""Compile the kernels ahead of their first use, and say which instruction set will run."""

import sys

from kernels import native

reason = native.available()
if reason is not None:
    sys.exit(reason)
print(f"kernels for {native.instruction_set()}")
