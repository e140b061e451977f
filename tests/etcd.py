"""A real etcd, where the machine has one."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

EXIT_S = 30.0


class EtcdServer:
    """One member on loopback; what it stored is there again after a restart."""

    def __init__(self, directory: Path) -> None:
        """Skips the test where there is no etcd."""
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed")
        self._directory = directory
        self._port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Does not wait for it to answer."""
        own, peers = f"http://{self.host}", f"http://127.0.0.1:{self._peer_port}"
        with (self._directory / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["etcd", f"--data-dir={self._directory / 'data'}", f"--listen-client-urls={own}",
                 f"--advertise-client-urls={own}", f"--listen-peer-urls={peers}",
                 f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(EXIT_S)
            self._process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
