"""Programs of others to measure beside ours, each in an environment of its own: none is a dependency."""

import subprocess
import sys
from pathlib import Path

from common.cache_directory import cache_directory

ROUTERS = {"vllm-router": "vllm-router==0.1.17", "sglang-router": "sglang-router==0.3.2"}
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # builds for CPUs, where the usual index has none


def install(requirement: str, program: str, first: str = "") -> Path:
    """The path of ``program`` after ``requirement`` (with its exact version) is there; downloads it once.
    ``first``, a build of PyTorch, is installed before: another one would come along otherwise."""
    environment = cache_directory() / "peers" / requirement
    found = environment / "bin" / program
    mark = environment / "complete"
    if not mark.exists():
        print(f"installing {requirement} into {environment}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        if first and subprocess.run([*pip, first], stdout=sys.stderr, check=False).returncode:
            subprocess.run([*pip, "--index-url", TORCH_INDEX, first], check=True, stdout=sys.stderr)
        subprocess.run([*pip, requirement], check=True, stdout=sys.stderr)
        mark.touch()
    return found
