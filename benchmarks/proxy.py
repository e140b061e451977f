"""What the proxy costs: latency it adds, tokens it can stream, CPU time for each.

    python -m benchmarks.proxy [--streams 1,32,256] [--seconds 5] [--router PROGRAM] [--output FILE.json]

One proxy process stands between a token source without a model (``benchmarks.token_source``) and a client in
this process. Figures:

- *request*: one request at a time for one token, from sending it to its first byte; the source answers at
  once, so all of it is the proxy's, save for the source's own turn. CPU time of the proxy for each.
- *paced*: N streams of 20 tokens a second each, so that every token is a chunk of its own; CPU time of the
  proxy for each token, and what that comes to in tokens a second of one core.
- *flat out*: N streams, tokens as fast as the source can tell them. A proxy that is behind puts several
  tokens into one chunk.

``--router``: the path of ``vllm-router`` or ``sglang-router``, in an environment of its own; the same client,
in the same run, through it to a source that speaks HTTP. A router passes text on and knows no tokens.
"""

import argparse
import asyncio
import functools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import uvloop

from benchmarks.sse_client import Connection, Streamed

PATH = "/v1/completions"
PACE = 20.0  # tokens a second of a paced stream
START_S = 60.0
REQUEST_S = 300.0
FLAT_OUT_TOKENS = 400  # a request; as many messages wait at most, fewer than the channel holds


class System(NamedTuple):
    port: int
    proxy: psutil.Process

    def cpu_s(self) -> float:
        times = self.proxy.cpu_times()
        return float(times.user + times.system)


OpenSystem = Callable[[float], AbstractContextManager[System]]  # with tokens a second of each stream


@contextmanager
def running(steps_per_s: float) -> Iterator[System]:
    """A proxy and a source, ready; both are gone afterwards."""
    port, control = free_port(), free_port()
    proxy = start("proxy", "--port", str(port), "--control-port", str(control))
    source = start("benchmarks.token_source", f"tcp://127.0.0.1:{control}", str(steps_per_s))
    try:
        wait_ready(port)
        yield System(port, psutil.Process(proxy.pid))
    finally:
        for process in (source, proxy):
            process.kill()
            process.wait()


@contextmanager
def routed(program: str, steps_per_s: float) -> Iterator[System]:
    """A router of others before a source that speaks HTTP."""
    source_port, port, metrics = free_port(), free_port(), free_port()
    source = start("benchmarks.http_source", str(source_port), str(steps_per_s))
    url, local = f"http://127.0.0.1:{source_port}", ("--host", "127.0.0.1", "--port", str(port))
    command = [program, "--worker-urls", url, "--policy", "round_robin", *local]
    command += ["--prometheus-port", str(metrics), "--log-level", "error"]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready(port, "/health")
        yield System(port, psutil.Process(router.pid))
    finally:
        for process in (source, router):
            process.kill()
            process.wait()


def start(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", module, *arguments], stderr=subprocess.DEVNULL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_ready(port: int, path: str = "/ready") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)  # another process: there is nothing to wait for
    raise TimeoutError(f"port {port} was not ready within {START_S:.0f} s")


def body(num_tokens: int) -> dict[str, object]:
    return {"model": "default", "prompt": "word " * 32, "max_tokens": num_tokens, "stream": True}


async def repeat(system: System, num_tokens: int, until: float) -> list[Streamed]:
    """One stream after another."""
    connection = Connection("127.0.0.1", system.port)
    found: list[Streamed] = []
    try:
        while time.perf_counter() < until or not found:
            async with asyncio.timeout(REQUEST_S):
                found.append(await connection.stream(PATH, body(num_tokens)))
    finally:
        connection.close()
    return found


async def measure(system: System, num_streams: int, num_tokens: int, seconds: float) -> dict[str, Any]:
    await repeat(system, 1, 0.0)  # the first request compiles and caches
    cpu_s, began = system.cpu_s(), time.perf_counter()
    streams = [repeat(system, num_tokens, began + seconds) for _ in range(num_streams)]
    replies = [reply for found in await asyncio.gather(*streams) for reply in found]
    took_s, cpu_s = time.perf_counter() - began, system.cpu_s() - cpu_s
    num_told = len(replies) * num_tokens
    firsts = sorted(reply.first_s for reply in replies)
    return {
        "streams": num_streams,
        "requests": len(replies),
        "tokens": num_told,
        "tokens_per_s": round(num_told / took_s, 1),
        "events_per_token": round(sum(reply.num_events - 1 for reply in replies) / num_told, 3),
        "first_byte_p50_ms": round(1e3 * statistics.median(firsts), 3),
        "first_byte_p99_ms": round(1e3 * firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))], 3),
        "cpu_us_per_request": round(1e6 * cpu_s / len(replies), 1),
        "cpu_us_per_token": round(1e6 * cpu_s / num_told, 2),
        "tokens_per_cpu_s": round(num_told / cpu_s) if cpu_s else None,
    }


def run(name: str, open_system: OpenSystem, streams: list[int], seconds: float) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []

    def note(kind: str, measured: dict[str, Any]) -> None:
        results.append({"system": name, "kind": kind} | measured)
        print(json.dumps(results[-1]), flush=True)

    with open_system(0) as system:
        note("request", uvloop.run(measure(system, 1, 1, seconds)))
        for count in streams:
            note("flat out", uvloop.run(measure(system, count, FLAT_OUT_TOKENS, seconds)))
    with open_system(PACE) as system:
        for count in streams:
            note("paced", uvloop.run(measure(system, count, round(PACE * seconds), 0.0)))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="1,32,256", help="numbers of streams at a time")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each figure")
    parser.add_argument("--router", default="", help="a router of others to measure in the same run")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    streams = [int(count) for count in arguments.streams.split(",")]
    results = run("baton", running, streams, arguments.seconds)
    if arguments.router:
        router = functools.partial(routed, arguments.router)
        results += run(Path(arguments.router).name, router, streams, arguments.seconds)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
