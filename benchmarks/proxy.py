"""What the proxy costs: latency it adds, tokens it can stream, CPU time for each.

    python -m benchmarks.proxy [--proxies 1,2] [--router NAME] [--streams 1,32,256] [--output FILE.json]

One proxy process, or several behind one port, stand between a token source without a model
(``benchmarks.token_source``) and a client in this process. Figures:

- *request*: one request at a time for one token, from sending it to its first byte. *Added* is that without
  what the source takes when it is asked directly, in the same run. CPU time of the proxy for each.
- *paced*: N streams of 20 tokens a second each, so that every token is a chunk of its own; CPU time of the
  proxy for each token, and what that comes to in tokens a second of one core.
- *flat out*: N streams, tokens as fast as the source can tell them. A proxy that is behind puts several
  tokens into one chunk.

``--router``: ``vllm-router`` or ``sglang-router``, or both, each installed in an environment of its own;
the same client, in the same run, through it to a source that speaks HTTP. A router passes text on and knows
no tokens.
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
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import uvloop

from benchmarks.environments import ROUTERS, install
from benchmarks.sse_client import Connection, Streamed
from common.channel import WorkerChannel
from common.messages import Generate, Outputs, Sampling, Welcome

PATH = "/v1/completions"
PACE = 20.0  # tokens a second of a paced stream
START_S = 60.0
REQUEST_S = 300.0
FLAT_OUT_TOKENS = 400  # a request; as many messages wait at most, fewer than the channel holds


class System(NamedTuple):
    port: int
    proxies: list[psutil.Process]
    direct_s: Callable[[float], Coroutine[Any, Any, list[float]]]  # times to the first token without a proxy

    def cpu_s(self) -> float:
        times = [proxy.cpu_times() for proxy in self.proxies]
        return float(sum(time.user + time.system for time in times))


OpenSystem = Callable[[float], AbstractContextManager[System]]  # with tokens a second of each stream


@contextmanager
def running(count: int, steps_per_s: float) -> Iterator[System]:
    """So many proxies with a source each, ready; all are gone afterwards."""
    port, own, control = free_port(), [free_port() for _ in range(count)], [free_port() for _ in range(count)]
    siblings = ",".join(map(str, own))
    proxies, sources = [], []
    try:
        for index in range(count):
            ports = ("--port", str(port), "--own-port", str(own[index]), "--sibling-ports", siblings)
            proxies.append(start("proxy", *ports, "--control-port", str(control[index])))
            address = f"tcp://127.0.0.1:{control[index]}"
            sources.append(start("benchmarks.token_source", address, str(steps_per_s)))
        for port_of_one in own:
            wait_ready(port_of_one)
        yield System(port, [psutil.Process(proxy.pid) for proxy in proxies], source_alone)
    finally:
        for process in (*sources, *proxies):
            process.kill()
            process.wait()


@contextmanager
def routed(program: str, steps_per_s: float) -> Iterator[System]:
    """A router of others before a source that speaks HTTP."""
    source_port, port, metrics = free_port(), free_port(), free_port()
    source = start("benchmarks.http_source", str(source_port), str(steps_per_s))
    url, local = f"http://127.0.0.1:{source_port}", ("--host", "127.0.0.1", "--port", str(port))
    launch = ["launch"] if program.endswith("sglang-router") else []
    command = [program, *launch, "--worker-urls", url, "--policy", "round_robin", *local]
    command += ["--prometheus-port", str(metrics), "--log-level", "error"]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready(port, "/health")
        yield System(port, [psutil.Process(router.pid)], functools.partial(http_source_alone, source_port))
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


async def repeat(port: int, num_tokens: int, until: float) -> list[Streamed]:
    """One stream after another."""
    connection = Connection("127.0.0.1", port)
    found: list[Streamed] = []
    try:
        while time.perf_counter() < until or not found:
            async with asyncio.timeout(REQUEST_S):
                found.append(await connection.stream(PATH, body(num_tokens)))
    finally:
        connection.close()
    return found


async def http_source_alone(port: int, seconds: float) -> list[float]:
    return [reply.first_s for reply in await repeat(port, 1, time.perf_counter() + seconds)]


async def source_alone(seconds: float) -> list[float]:
    """The source's answers to somebody who does with requests and tokens nothing but pass them on."""
    channel = WorkerChannel("tcp://127.0.0.1:0")
    source = start("benchmarks.token_source", channel.address, "0")
    try:
        async with asyncio.timeout(START_S):
            peer, _ = await channel.receive()
        channel.send(peer, Welcome("benchmark"))
        found: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or not found:
            generate = Generate(uuid.uuid4().hex, 0, tuple(range(64)), 64, "benchmark", Sampling(1))
            began = time.perf_counter()
            channel.send(peer, generate)
            while not isinstance((await channel.receive())[1], Outputs):
                pass
            found.append(time.perf_counter() - began)
        return found
    finally:
        source.kill()
        source.wait()
        channel.close()


async def measure(system: System, num_streams: int, num_tokens: int, seconds: float) -> dict[str, Any]:
    await repeat(system.port, 1, 0.0)  # the first request compiles and caches
    cpu_s, began = system.cpu_s(), time.perf_counter()
    streams = [repeat(system.port, num_tokens, began + seconds) for _ in range(num_streams)]
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
        measured = uvloop.run(measure(system, 1, 1, seconds))
        direct = sorted(uvloop.run(system.direct_s(seconds)))
        for rank, place in (("p50", len(direct) // 2), ("p99", int(0.99 * len(direct)))):
            added_ms = measured[f"first_byte_{rank}_ms"] - 1e3 * direct[place]
            measured[f"added_{rank}_ms"] = round(added_ms, 3)
        note("request", measured)
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
    parser.add_argument("--proxies", default="1", help="numbers of proxies behind one port")
    parser.add_argument("--router", action="append", choices=sorted(ROUTERS), default=[], help="of others")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    streams = [int(count) for count in arguments.streams.split(",")]
    results = []
    for count in map(int, arguments.proxies.split(",")):
        name = "baton" if count == 1 else f"baton x {count}"
        results += run(name, functools.partial(running, count), streams, arguments.seconds)
    for router in arguments.router:
        program = str(install(ROUTERS[router], router))
        results += run(router, functools.partial(routed, program), streams, arguments.seconds)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
