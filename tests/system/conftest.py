from collections.abc import Iterator

import pytest

from tests.system.server import Server, serving


@pytest.fixture(scope="session")
def system() -> Iterator[Server]:
    """One proxy, one prefill and one decode worker, shared by tests that do no harm to it."""
    with serving() as server:
        yield server
