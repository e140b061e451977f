"""Programs of others to measure beside ours, each in an environment of its own: none is a dependency."""

import subprocess
import sys
from pathlib import Path

from common.cache_directory import cache_directory


def install(requirement: str, program: str) -> Path:
    """The path of ``program`` after ``requirement`` (with its exact version) is there; downloads it once."""
    environment = cache_directory() / "peers" / requirement
    found = environment / "bin" / program
    if not found.exists():
        print(f"installing {requirement} into {environment}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", requirement]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    return found
