import pytest

from common.config import ConfigError, ProxyConfig
from proxy.server import found_address

LISTENING = "tcp://0.0.0.0:7003"


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, "tcp://127.0.0.1:7003"),
        ({"control_host": "10.0.0.1"}, "tcp://10.0.0.1:7003"),
        ({"control_host": "0.0.0.0", "control_advertise_host": "host-a"}, "tcp://host-a:7003"),
        ({"control_host": "::1", "control_port": 0}, "tcp://[::1]:7003"),
    ],
)
def test_workers_find_a_proxy_where_they_can_reach_it(options: dict[str, object], address: str) -> None:
    assert found_address(ProxyConfig(**options), LISTENING) == address  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_reach_is_not_told(host: str) -> None:
    with pytest.raises(ConfigError, match="--control-advertise-host"):
        found_address(ProxyConfig(control_host=host), LISTENING)
