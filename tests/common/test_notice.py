"""What a process says to whoever waits for it to serve."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.notice import VARIABLE, tell_ready


@pytest.fixture
def listener(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """Under a name in the file system, or an abstract one."""
    name = f"{'@' if request.param else ''}{tmp_path}/ear"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.settimeout(30.0)
        ear.bind(name.replace("@", "\0"))
        monkeypatch.setenv(VARIABLE, name)
        yield ear


@pytest.mark.parametrize("listener", [False, True], indirect=True)
def test_whoever_waits_is_told_once(listener: socket.socket) -> None:
    tell_ready()
    assert listener.recv(100) == b"READY=1"
    assert VARIABLE not in os.environ
    tell_ready()
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(100)


def test_where_nobody_listens_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nobody"))
    tell_ready()
    assert VARIABLE not in os.environ
