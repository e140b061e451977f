"""Compile the kernels ahead of their first use, and say which instruction set will run. With the name of a
directory: into that, which ``BATON_NATIVE_DIR`` names later, where there is no compiler."""

import os
import sys
from pathlib import Path

from kernels import native
from kernels.native import build

if len(sys.argv) > 1:
    try:
        build.prepare(Path(sys.argv[1]))
    except (build.BuildError, OSError) as error:
        sys.exit(str(error))
    os.environ[build.DIRECTORY_VARIABLE] = sys.argv[1]
reason = native.available()
if reason is not None:
    sys.exit(reason)
print(f"kernels for {native.instruction_set()}")
