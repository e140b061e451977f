"""From the ``--transport`` option to the address that a decode worker listens on."""

import sys
import tempfile
from pathlib import Path

from common.config import ConfigError, WorkerConfig
from common.hosts import is_loopback
from kv_transfer.transport import available, join_host


def listen_address(
    transport: str, worker: WorkerConfig, incarnation: str, trusted_network: bool = False
) -> str:
    """``auto`` is ``ipc`` where only this machine could reach us anyway; elsewhere ZeroMQ over TCP, which
    works between any two machines. Raises ``ConfigError`` when the transport is not to be had here."""
    place = join_host(worker.bind_host, worker.transfer_port)
    if transport == "auto" and is_loopback(worker.bind_host) and not worker.advertise_host:
        transport = "ipc"
    if transport in ("auto", "zmq"):
        return f"zmq+tcp://{place}"
    if transport == "ipc":
        return f"zmq+ipc://{_socket_name(incarnation)}"
    if transport == "ucx":
        if "ucx" not in available():
            raise ConfigError("--transport ucx needs the package ucxx: install the extra named ucx")
        if not (trusted_network or is_loopback(worker.bind_host)):
            text = "encrypts nothing: say --trusted-network, or bind a loopback address"
            raise ConfigError(f"--transport ucx {text}")
        return f"ucx://{place}"
    raise ConfigError("--transport inproc connects workers inside one process only")


def _socket_name(incarnation: str) -> str:
    """On Linux a name without a file: a worker that is killed leaves nothing behind."""
    name = f"baton-{incarnation}"
    return f"@{name}" if sys.platform == "linux" else str(Path(tempfile.gettempdir()) / f"{name}.sock")
