"""Ports that ``baton serve`` gives to its proxies, found out before anything starts."""

import contextlib
import errno
import socket
import sys
from typing import NamedTuple

from common.config import ConfigError


class ClaimedPort(NamedTuple):
    port: int
    claim: socket.socket  # keep it open while the port is in use


def require_free(host: str, port: int, option: str) -> None:
    """ConfigError, naming ``option``, unless a server could listen there now."""
    _listen(host, port, option).close()


def claim(host: str, port: int, fixed: bool, option: str) -> ClaimedPort:
    """``port``, or a free one if it is taken and not ``fixed``. Another ``baton serve`` that starts at
    the same time, before our proxies listen, sees the claim and takes another one."""
    if port == 0:
        return _any_port(host, option)
    mark = _mark(port)
    if mark is not None:
        try:
            require_free(host, port, option)
            return ClaimedPort(port, mark)
        except ConfigError:
            mark.close()
            if fixed:
                raise
    elif fixed:
        raise ConfigError(f"--{option}: {port} is taken by another baton serve")
    return _any_port(host, option)


def _any_port(host: str, option: str) -> ClaimedPort:
    for _ in range(100):
        with _listen(host, 0, option) as probe:
            port = int(probe.getsockname()[1])
        mark = _mark(port)
        if mark is not None:
            return ClaimedPort(port, mark)
    raise ConfigError(f"--{option}: no free port on {host}")


def _listen(host: str, port: int, option: str) -> socket.socket:
    with contextlib.ExitStack() as unless_it_listens:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = unless_it_listens.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
        except OSError as error:
            raise ConfigError(f"--{option}: {_why_not(host, port, option, error)}") from error
        unless_it_listens.pop_all()
        return listener


def _why_not(host: str, port: int, option: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is taken by another process; choose another with --{option}"
    return f"cannot listen on {host}{f':{port}' if port else ''}: {error.strerror}"


def _mark(port: int) -> socket.socket | None:
    """A mark on ``port`` that every ``baton serve`` of this machine sees and that goes when we end; None when
    another has it. It is a Unix socket in Linux's abstract namespace; on other systems it marks nothing."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            mark.bind(f"\0baton-port-{port}")
    except OSError:
        mark.close()
        return None
    return mark
