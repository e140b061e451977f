import socket

import pytest

from common.config import ConfigError
from control_plane import ports

HOST = "127.0.0.1"


def taken() -> socket.socket:
    listener = socket.socket()
    listener.bind((HOST, 0))
    listener.listen()
    return listener


def test_a_taken_port_is_refused_with_the_options_name() -> None:
    with taken() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"--port: {HOST}:{port} is taken by another process; .*--port"
        ):
            ports.require_free(HOST, port, "port")
    ports.require_free(HOST, port, "port")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--port: cannot listen on 192\.0\.2\.1:8000"):
        ports.require_free("192.0.2.1", 8000, "port")
    with pytest.raises(ConfigError, match=r"--control-port: cannot listen on 192\.0\.2\.1: "):
        ports.claim("192.0.2.1", 7000, option="control-port", fixed=False)


def test_a_host_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--control-port: cannot listen on nowhere\.invalid: "):
        ports.claim("nowhere.invalid", 7000, option="control-port", fixed=False)


def test_a_control_port_that_is_taken_is_replaced_unless_it_was_asked_for() -> None:
    with taken() as listener:
        port = listener.getsockname()[1]
        replacement = ports.claim(HOST, port, option="control-port", fixed=False)
        with replacement.claim:
            assert replacement.port != port
            ports.require_free(HOST, replacement.port, "control-port")
        with pytest.raises(ConfigError, match=f"--control-port: {HOST}:{port} is taken"):
            ports.claim(HOST, port, option="control-port", fixed=True)


def test_two_servers_that_start_at_once_choose_different_control_ports() -> None:
    with taken() as listener:
        port = listener.getsockname()[1]
    first = ports.claim(HOST, port, option="control-port", fixed=False)  # nobody listens there yet
    with first.claim:
        second = ports.claim(HOST, port, option="control-port", fixed=False)
        with second.claim:
            assert first.port == port
            assert second.port != port
        with pytest.raises(ConfigError, match=f"--control-port: {port} is taken by another baton serve"):
            ports.claim(HOST, port, option="control-port", fixed=True)
    again = ports.claim(HOST, port, option="control-port", fixed=True)
    again.claim.close()
    assert again.port == port
