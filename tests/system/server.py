"""A whole system, started by ``baton serve`` as a user starts it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 90.0
# Small enough to start fast beside other tests.
SMALL = ("--dtype", "float32", "--num-blocks", "256", "--max-model-len", "2048")
# Short prompts would stay where they are decoded, and the hand-over untried.
HANDS_OVER = ("--disaggregate", "always")


@dataclass(slots=True)
class Server:
    process: "subprocess.Popen[str]"
    url: str
    lines: list[str] = field(default_factory=list)
    grown: threading.Condition = field(default_factory=threading.Condition)
    ended: bool = False

    def read(self) -> None:
        """Collect the output until it ends; runs in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.grown:
                self.lines.append(line.rstrip("\n"))
                self.grown.notify_all()
        with self.grown:
            self.ended = True
            self.grown.notify_all()

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = START_TIMEOUT_S) -> list[str]:
        """Lines of output that match, once there are ``count``."""
        found: list[str] = []

        def enough() -> bool:
            found[:] = [line for line in self.lines if re.search(pattern, line)]
            return len(found) >= count or self.ended

        with self.grown:
            in_time = self.grown.wait_for(enough, timeout_s)
        assert in_time, f"{pattern!r} did not appear in:\n{self.output}"
        assert len(found) >= count, f"ended without {pattern!r}:\n{self.output}"
        return found

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def pids(self) -> dict[str, int]:
        """The latest process of each name."""
        matches = (re.match(r"  (\S+) +pid (\d+)", line) for line in self.lines)
        return {match[1]: int(match[2]) for match in matches if match}

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def complete(self, prompt: str, max_tokens: int = 8, **fields: object) -> str:
        body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=START_TIMEOUT_S, trust_env=False)
        assert reply.status_code == 200, reply.text
        return str(json.loads(reply.text)["choices"][0]["text"])


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    """``baton serve`` with ``options`` on a free port, ready to serve; nothing of it is left afterwards."""
    port = free_port()
    process = subprocess.Popen(
        [*baton("serve"), "--port", str(port), *SMALL, *HANDS_OVER, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
    )
    server = Server(process, f"http://127.0.0.1:{port}")
    reader = threading.Thread(target=server.read)
    reader.start()
    try:
        server.wait_for("^ready after")
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()  # its children die with it
            reader.join()
            assert process.stdout is not None
            process.stdout.close()


def baton(*words: str) -> Sequence[str]:
    return [sys.executable, "-m", "control_plane", *words]


def clean_environment() -> dict[str, str]:
    """Without options that the machine's user has set."""
    kept = ("BATON_CACHE_DIR", "BATON_NATIVE_ISA")
    return {
        name: value for name, value in os.environ.items() if not name.startswith("BATON_") or name in kept
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
