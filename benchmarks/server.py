"""A system under test, started as a user starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Reply:
    ttft_s: float  # until the first token, as the client sees it
    total_s: float
    token_ids: list[int]
    timings: dict[str, float]  # the server's own split
    arrivals_s: list[float]  # when each chunk with tokens came, from the start


@dataclass(frozen=True, slots=True)
class Server:
    url: str

    def complete(self, prompt: list[int], max_tokens: int) -> Reply:
        """Stream a greedy completion of token ids that does not end early."""
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "timings": True,
        }
        started = time.perf_counter()
        arrivals_s: list[float] = []
        token_ids: list[int] = []
        timings: dict[str, float] = {}
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, verify=False
        ) as response:  # not verified, as reading the system's certificates takes 50 ms
            response.raise_for_status()
            for chunk in events(response):
                choice = chunk["choices"][0] if chunk["choices"] else {}
                if choice.get("token_ids"):
                    arrivals_s.append(time.perf_counter() - started)
                token_ids += choice.get("token_ids") or []
                timings |= choice.get("timings") or {}
        total_s = time.perf_counter() - started
        return Reply(arrivals_s[0], total_s, token_ids, timings, arrivals_s)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The chunks of an event stream."""
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if line.startswith("data: ") and data != "[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise ConnectionError(chunk["error"]["message"])
            yield chunk


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    """``baton serve`` with ``options``, ready; ended afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "control_plane", "serve", "--port", str(port), *options]
    with running(command, port) as server:
        yield server


@contextmanager
def running(
    command: list[str],
    port: int,
    ready_path: str = "/ready",
    start_timeout_s: float = START_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server that listens on ``port``, once it is ready; ended afterwards, with what it started."""
    server = Server(f"http://127.0.0.1:{port}")
    with unwound_by_sigterm():
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(os.environ if environment is None else environment),
            start_new_session=True,
        )
        try:
            wait_ready(server, process, ready_path, start_timeout_s)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """By default SIGTERM ends this process alone, and what it has started stays."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def wait_ready(
    server: Server,
    process: "subprocess.Popen[bytes]",
    path: str = "/ready",
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with exit code {process.returncode}")
        try:
            if httpx.get(f"{server.url}{path}", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{process.args!r} was not ready within {timeout_s:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
