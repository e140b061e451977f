"""From the ``--transport`` option to the address that a decode worker listens on."""

import sys
import tempfile
from pathlib import Path

from common.config import ConfigError, WorkerConfig
from kv_transfer.transport import available, join_host


def listen_address(transport: str, worker: WorkerConfig, incarnation: str) -> str:
    """``auto`` is ZeroMQ over TCP: it works between any two machines, and what it costs is known. Raises
    ``ConfigError`` when the transport is not to be had here."""
    place = join_host(worker.bind_host, worker.transfer_port)
    if transport in ("auto", "zmq"):
        return f"zmq+tcp://{place}"
    if transport == "ipc":
        return f"zmq+ipc://{_socket_name(incarnation)}"
    if transport == "ucx":
        if "ucx" not in available():
            raise ConfigError("--transport ucx needs the package ucxx: install the extra named ucx")
        return f"ucx://{place}"
    raise ConfigError("--transport inproc connects workers inside one process only")


def _socket_name(incarnation: str) -> str:
    """On Linux a name without a file: a worker that is killed leaves nothing behind."""
    name = f"baton-{incarnation}"
    return f"@{name}" if sys.platform == "linux" else str(Path(tempfile.gettempdir()) / f"{name}.sock")
