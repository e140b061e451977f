"""llama.cpp's server, built beforehand, with ``llama-quantize`` beside it: see
https://github.com/ggml-org/llama.cpp for how."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.server import Server, free_port, running
from common import model_source
from common.cache_directory import cache_directory
from common.config import DEFAULT_MODEL

START_TIMEOUT_S = 60.0
OWN_TYPE = "Q4_1"  # of most tensors of the default model's file
TYPES = (OWN_TYPE, "Q8_0", "BF16")


@contextmanager
def serving(program: Path, weights: str, num_slots: int = 32) -> Iterator[Server]:
    """``program`` is a ``llama-server``, ``weights`` one of ``TYPES``; on all cores that we have."""
    port, num_threads = free_port(), len(os.sched_getaffinity(0))
    model = model_of(program, weights)
    threads = ["-t", str(num_threads), "-tb", str(num_threads)]
    room = ["-np", str(num_slots), "-c", "32768", "--kv-unified"]  # for all slots together
    # Its AMX kernels for whole numbers, part of repacking, crash here with an illegal instruction.
    options = [] if weights == "BF16" else ["--no-repack"]
    command = [str(program), "-m", str(model), "--port", str(port), *threads, *room, *options]
    with running(command, port, "/health", START_TIMEOUT_S) as server:
        yield server


def model_of(program: Path, weights: str) -> Path:
    """The default model's own file, or that file with its weights as another type, made when first asked
    for."""
    own = model_source.resolve(DEFAULT_MODEL).weights[0]
    if weights == OWN_TYPE:
        return own
    place = cache_directory() / "peers" / f"smollm2-135m-instruct-{weights.lower()}.gguf"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_suffix(".part")
        command = [str(program.with_name("llama-quantize")), "--allow-requantize"]
        subprocess.run([*command, str(own), str(unfinished), weights], check=True, stdout=sys.stderr)
        unfinished.rename(place)
    return place
