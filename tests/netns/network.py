"""A network on one machine: each node has a namespace and an address of its own, and a wire to a switch.

    test process      node        node
      client          eth0        eth0        198.18.N.1, .2, .3, ...
        |              |           |
        +----- bridge of the switch's namespace -----+

A wire can be taken down, slowed, or kept apart from some others. What a killed run left behind is removed
when the next one starts: names carry the process that made them.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

NAMESPACES = Path("/run/netns")
PREFIX = "baton-test-"
COMMAND_TIMEOUT_S = 20.0


class Home(NamedTuple):
    namespace: str
    address: str


class NetworkError(RuntimeError):
    """The system refused a command."""


class Network:
    """``NetworkError`` where there is no right to make one."""

    def __init__(self) -> None:
        sweep()
        self._token = secrets.token_hex(2)
        self._prefix = f"{PREFIX}{os.getpid()}-{self._token}-"
        self._switch = f"{self._prefix}switch"
        self._subnet = free_subnet()
        self._homes: dict[str, Home] = {}
        self._num_addresses = 1
        try:
            self._build()
        except NetworkError:
            self.close()
            raise

    def _build(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        client = f"bt{self._token}{os.getpid()}"  # names of interfaces have 15 characters at most
        ip("link", "add", client, "type", "veth", "peer", "name", "client", "netns", self._switch)
        ip("addr", "add", f"{self._subnet}.1/24", "dev", client)
        ip("link", "set", client, "up")
        self._plug("client")

    def _plug(self, port: str) -> None:
        ip("-n", self._switch, "link", "set", "dev", port, "master", "bridge", "up")

    def close(self) -> None:
        for namespace in (*(home.namespace for home in self._homes.values()), self._switch):
            if (NAMESPACES / namespace).exists():
                ip("netns", "del", namespace)
        self._homes.clear()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def home(self, name: str) -> Home:
        """The node of this name, made when it is first asked for."""
        if name not in self._homes:
            self._homes[name] = home = Home(f"{self._prefix}{name}", self._next_address())
            ip("netns", "add", home.namespace)
            ip("-n", home.namespace, "link", "set", "lo", "up")
            eth0 = ("eth0", "netns", home.namespace)
            ip("-n", self._switch, "link", "add", "name", name, "type", "veth", "peer", "name", *eth0)
            ip("-n", home.namespace, "addr", "add", f"{home.address}/24", "dev", "eth0")
            ip("-n", home.namespace, "link", "set", "eth0", "up")
            self._plug(name)
        return self._homes[name]

    def move(self, name: str) -> Home:
        """Give the node another address, and no other than that."""
        old = self.home(name)
        self._homes[name] = home = Home(old.namespace, self._next_address())
        ip("-n", home.namespace, "addr", "flush", "dev", "eth0")
        ip("-n", home.namespace, "addr", "add", f"{home.address}/24", "dev", "eth0")
        return home

    def _next_address(self) -> str:
        self._num_addresses += 1
        return f"{self._subnet}.{self._num_addresses}"

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """Nobody reaches the node, and it reaches nobody."""
        ip("-n", self._switch, "link", "set", "dev", name, "down")
        try:
            yield
        finally:
            ip("-n", self._switch, "link", "set", "dev", name, "up")

    @contextmanager
    def apart(self, *names: str) -> Iterator[None]:
        """These nodes do not reach each other; with all others nothing changes."""
        self._isolate(names, "on")
        try:
            yield
        finally:
            self._isolate(names, "off")

    def _isolate(self, names: tuple[str, ...], isolated: str) -> None:
        for name in names:
            ip("-n", self._switch, "link", "set", "dev", name, "type", "bridge_slave", "isolated", isolated)

    @contextmanager
    def slowed(self, name: str, rate: str) -> Iterator[None]:
        """What goes to the node passes at ``rate``, such as ``1mbit``."""
        limit(self._switch, name, rate)
        try:
            yield
        finally:
            run("tc", "-n", self._switch, "qdisc", "del", "dev", name, "root")


def why_not() -> str:
    """What stands against networks of namespaces here; empty when nothing does."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        return f"no {' and '.join(missing)}" if missing else "not run by root"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        ip("netns", "add", probe)
        ip("-n", probe, "link", "add", "bridge", "type", "bridge")
        ip("-n", probe, "link", "add", "one", "type", "veth", "peer", "name", "other")
        limit(probe, "one", "1mbit")
    except NetworkError as error:
        return str(error)
    finally:
        if (NAMESPACES / probe).exists():
            ip("netns", "del", probe)
    return ""


def sweep() -> None:
    """Remove what test processes that are no more have left. A wire goes with its end in the namespace."""
    for path in NAMESPACES.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            ip("netns", "del", path.name)


def free_subnet() -> str:
    """The first three numbers of one in 198.18.0.0/15, which is set aside for tests."""
    taken = ip("-4", "-o", "addr")
    start = os.getpid() % 256
    candidates = (f"198.18.{(start + step) % 256}" for step in range(256))
    return next(subnet for subnet in candidates if f" {subnet}." not in taken)


def limit(namespace: str, port: str, rate: str) -> None:
    bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "300ms")
    run("tc", "-n", namespace, "qdisc", "add", "dev", port, "root", *bucket)


def ip(*arguments: str) -> str:
    return run("ip", *arguments)


def run(*command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
