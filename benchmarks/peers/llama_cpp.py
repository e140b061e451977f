"""llama.cpp's server, built beforehand: see https://github.com/ggml-org/llama.cpp for how."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.server import Server, free_port, running
from common import model_source
from common.config import DEFAULT_MODEL

START_TIMEOUT_S = 60.0


@contextmanager
def serving(program: Path, num_slots: int = 32) -> Iterator[Server]:
    """``program`` is a ``llama-server``; it gets the default model's own file, Q4_1."""
    port, num_threads = free_port(), len(os.sched_getaffinity(0))
    model = model_source.resolve(DEFAULT_MODEL).weights[0]
    options = ["-t", str(num_threads), "-tb", str(num_threads), "-np", str(num_slots), "-c", "16384"]
    command = [str(program), "-m", str(model), "--port", str(port), *options]
    with running(command, port, "/health", START_TIMEOUT_S) as server:
        yield server
