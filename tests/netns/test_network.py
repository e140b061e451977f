"""The network itself: nodes reach each other, except where they shall not, and nothing is left behind."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.netns import network
from tests.netns.inside import enter
from tests.netns.network import NAMESPACES, PREFIX, Home, Network

T = TypeVar("T")

pytestmark = pytest.mark.netns
PORT = 7000
SILENCE_S = 0.5
DONE_S = 20.0


@pytest.fixture
def town() -> Iterator[Network]:
    if reason := network.why_not():
        pytest.skip(f"no network namespaces: {reason}")
    with Network() as made:
        yield made


def at(home: Home, do: Callable[[], T]) -> T:
    """In a thread that has gone there: a socket stays where it was made."""

    def there() -> T:
        enter(home.namespace)
        return do()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(there).result(DONE_S)


def reaches(one: Home, other: Home, within_s: float) -> bool:
    try:
        at(one, lambda: socket.create_connection((other.address, PORT), within_s)).close()
    except OSError:
        return False
    return True


def test_nodes_reach_each_other_unless_they_are_kept_apart_or_unplugged(town: Network) -> None:
    p, d, other = (town.home(name) for name in ("p", "d", "other"))
    with at(d, lambda: socket.create_server((d.address, PORT), backlog=64)):
        assert reaches(p, d, DONE_S)
        with town.apart("p", "d"):
            assert not reaches(p, d, SILENCE_S) and reaches(other, d, DONE_S)
        with town.unplugged("p"):
            assert not reaches(p, d, SILENCE_S) and reaches(other, d, DONE_S)
        assert reaches(p, d, DONE_S)


def test_a_node_that_has_moved_has_only_its_new_address(town: Network) -> None:
    p, old = town.home("p"), town.home("d")
    new = town.move("d")
    with at(new, lambda: socket.create_server(("", PORT))):
        assert new.address != old.address
        assert reaches(p, new, DONE_S) and not reaches(p, old, SILENCE_S)


def test_what_a_killed_run_has_left_is_removed(town: Network) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(DONE_S)
    left = f"{PREFIX}{ended.pid}-0000-switch"
    network.ip("netns", "add", left)
    with Network():
        assert not (NAMESPACES / left).exists()
        assert any(NAMESPACES.glob(f"{PREFIX}*-switch")), "others are left alone"
