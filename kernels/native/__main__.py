"""Compile the kernels ahead of their first use, and say which instruction set will run. With the name of a
file: into that file, which ``BATON_NATIVE_LIBRARY`` names later, where there is no compiler."""

import os
import sys
from pathlib import Path

from kernels import native
from kernels.native import build

if len(sys.argv) > 1:
    try:
        build.build(Path(sys.argv[1]).absolute(), ())
    except (build.BuildError, OSError) as error:
        sys.exit(str(error))
    os.environ[build.LIBRARY_VARIABLE] = sys.argv[1]
reason = native.available()
if reason is not None:
    sys.exit(reason)
print(f"kernels for {native.instruction_set()}")
