"""A real system for tests: one proxy, prefill and decode workers, each a process of its own on free ports.

With ``relayed`` transfers go through a relay: a decode worker binds 127.0.0.1:port and advertises 127.0.0.2,
where the relay listens on the same port. With ``relayed_control`` each worker reaches the proxy through a
relay of its own, on 127.0.1.N.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from common.cores import thread_variables
from tests.faults.nursery import LAUNCH, ROOT, Forked
from tests.faults.relay import Address, Relay
from tests.faults.waiting import eventually

READY_S = 90.0
EXIT_S = 30.0
POLL_S = 0.05
LOG_TAIL_LINES = 40
MODULES = {"proxy": "proxy", "p": "prefill_worker", "d": "decode_worker"}


class Usage(NamedTuple):
    """What a process holds."""

    pid: int
    num_fds: int
    num_threads: int
    num_mappings: int
    rss_bytes: int
    cpu_s: float


class Process:
    """One member of the cluster; its log goes on over restarts."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        max_fds: int = 0,
        forked: bool = False,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.num_starts = 0
        self._environment = dict(environment)
        self._max_fds = max_fds
        self._forked = forked
        self._process: subprocess.Popen[bytes] | Forked | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already"
        self.num_starts += 1
        with self.log.open("ab") as output:
            output.write(f"--- start {self.num_starts} of {self.name}\n".encode())
        environment = os.environ | self._environment
        if self._forked:
            self._process = Forked(self.argv, environment, self.log)
        else:
            self._process = self._executed(environment)
        if self._max_fds:
            psutil.Process(self.pid).rlimit(psutil.RLIMIT_NOFILE, (self._max_fds, self._max_fds))

    def _executed(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-IS", str(LAUNCH), str(os.getpid()), sys.executable]
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [*launcher, *self.argv],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = EXIT_S) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """At once, and reaped. One that has been is left alone: its number may be another's by now."""
        if self._process is not None and self.alive:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(self._process.pid, signal.SIGKILL)
            self._process.wait(EXIT_S)

    def usage(self) -> Usage:
        process = psutil.Process(self.pid)
        with process.oneshot():
            times = process.cpu_times()
            return Usage(
                pid=self.pid,
                num_fds=process.num_fds(),
                num_threads=process.num_threads(),
                num_mappings=len(process.memory_maps(grouped=False)),
                rss_bytes=process.memory_info().rss,
                cpu_s=times.user + times.system,
            )

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return "\n".join(lines[-LOG_TAIL_LINES:])


class Cluster:
    def __init__(
        self,
        directory: Path,
        model: str,
        prefill: int = 1,
        decode: int = 1,
        options: Sequence[str] = (),
        prefill_options: Sequence[str] = (),
        decode_options: Sequence[str] = (),
        proxy_options: Sequence[str] = (),
        transport: str = "zmq",
        relayed: bool = False,
        relayed_control: bool = False,
        max_fds: int = 0,
        forked: bool = True,
        placed: Callable[[str, list[str]], list[str]] = lambda _, argv: argv,
    ) -> None:
        """``options`` go to all workers. ``max_fds`` limits each process; 0: no limit of ours. ``forked``:
        workers start fast, see ``tests.faults.nursery``. ``placed`` puts a process, by its name and command
        line, somewhere else than on loopback."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.relays: dict[str, Relay] = {}
        self.processes: dict[str, Process] = {}
        self.http_port, self.control_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self._model = model
        self._max_fds, self._forked = max_fds, forked
        self._placed = placed
        self._relayed, self._relayed_control = relayed, relayed_control
        ports = [f"--port={self.http_port}", f"--control-port={self.control_port}"]
        # Short prompts would stay where they are decoded, and most faults without an effect.
        proxy = [*ports, "--disaggregate=always", *proxy_options]
        self._add("proxy", [f"--model={model}", *proxy])
        self._worker_options = engine = [
            "--dtype=float32",
            f"--transport={transport}",
            "--check-invariants",
            *options,
        ]
        for index in range(prefill):
            self._add_worker(f"p{index + 1}", [*engine, *prefill_options])
        for index in range(decode):
            self._add_worker(f"d{index + 1}", [*engine, *decode_options])

    def _add_worker(self, name: str, options: list[str]) -> None:
        host = "127.0.0.1"
        if self._relayed_control:
            address = Address(f"127.0.1.{len(self.processes) + 1}", self.control_port)
            self.relays[f"{name}.control"] = Relay(Address(host, self.control_port), address)
            host = address.host
        argv = [f"--model={self._model}", f"--name={name}", f"--proxies=tcp://{host}:{self.control_port}"]
        if name.startswith("d") and self._relayed:
            port = free_port()
            self.relays[name] = Relay(Address("127.0.0.1", port), Address("127.0.0.2", port))
            argv += [f"--transfer-port={port}", "--advertise-host=127.0.0.2"]
        self._add(name, [*argv, *options])

    def _add(self, name: str, options: list[str]) -> None:
        module = MODULES[name.rstrip("0123456789")]
        environment = thread_variables(1) | {"PYTHONUNBUFFERED": "1"}
        argv = self._placed(name, ["-m", module, *options])
        forked = self._forked and module != "proxy"
        log = self.directory / f"{name}.log"
        self.processes[name] = Process(name, argv, log, environment, self._max_fds, forked)

    # Life

    def start(self) -> None:
        for process in self.processes.values():
            process.start()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for relay in self.relays.values():
            relay.close()

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    @property
    def workers_named(self) -> list[str]:
        return [name for name in self.processes if name != "proxy"]

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.processes.items()}

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def stop(self, name: str) -> None:
        self.processes[name].signal(signal.SIGSTOP)

    def cont(self, name: str) -> None:
        self.processes[name].signal(signal.SIGCONT)

    def restart(self, name: str) -> None:
        """Kill and start again, without waiting for it to be ready."""
        self.processes[name].kill()
        self.processes[name].start()

    @contextmanager
    def extra(self, name: str, options: Sequence[str]) -> Iterator[Process]:
        """One more worker for a while, with ``options`` over those of the others."""
        self._add_worker(name, [*self._worker_options, *options])
        try:
            self.processes[name].start()
            yield self.processes[name]
        finally:
            self.processes.pop(name).kill()
            for relay in (name, f"{name}.control"):
                if relay in self.relays:
                    self.relays.pop(relay).close()

    def repair(self) -> None:
        """Relays pass everything on, stopped processes go on, dead ones are started."""
        for relay in self.relays.values():
            relay.set()
        for name, process in self.processes.items():
            if process.alive:
                self.cont(name)
            else:
                process.start()

    # What it says

    async def get(self, path: str, timeout_s: float = 10.0) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=timeout_s, verify=False) as http:
            return await http.get(path)

    async def workers(self) -> dict[str, dict[str, Any]]:
        """What /workers says, by name; empty while the proxy cannot be reached."""
        try:
            response = await self.get("/workers")
        except httpx.TransportError:
            return {}
        return {worker["name"]: worker for worker in response.json()["workers"]}

    async def ready(self, within_s: float = READY_S, but: Sequence[str] = ()) -> None:
        """All workers, save ``but``, are registered under their present pids and take work."""
        expected = {n: p.pid for n, p in self.processes.items() if n != "proxy" and n not in but}

        async def registered() -> bool:
            for name, process in self.processes.items():
                assert process.alive or name in but, f"{name} ended with {process.exit_code}"
            workers = await self.workers()
            return all(
                name in workers and workers[name]["pid"] == pid and workers[name]["state"] == "ready"
                for name, pid in expected.items()
            )

        try:
            await eventually(registered, within_s, "all workers are ready", POLL_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    async def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name with labels."""
        lines = (await self.get("/metrics")).text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    async def quiet(self, within_s: float = 20.0) -> None:
        """Nothing is under way anywhere and every block is free again, by reports newer than this call."""
        asked_at = time.monotonic()

        async def holds_nothing() -> bool:
            workers = await self.workers()
            now = time.monotonic()
            return bool(workers) and all(
                now - worker["heard_s_ago"] > asked_at and is_idle(worker["load"])
                for worker in workers.values()
            )

        try:
            await eventually(holds_nothing, within_s, "every block is free again", POLL_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{await self.workers()}\n{self.logs()}") from None

    def usage(self) -> dict[str, Usage]:
        return {name: process.usage() for name, process in self.processes.items()}

    def logs(self) -> str:
        return "\n".join(f"===== {name}\n{process.tail()}" for name, process in self.processes.items())


def is_idle(load: Mapping[str, int]) -> bool:
    busy = ("num_waiting", "num_running", "num_parked_blocks", "num_receiving")
    return load["num_free_blocks"] == load["num_blocks"] and not any(load[name] for name in busy)


def free_port() -> int:
    """Bound on all of loopback at the time of asking."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@asynccontextmanager
async def running(directory: Path, model: str, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster that is ready."""
    cluster = Cluster(directory, model, **options)
    try:
        cluster.start()
        await cluster.ready()
        yield cluster
    finally:
        cluster.close()
