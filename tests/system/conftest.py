from collections.abc import Iterator

import pytest

from common.secret import Secret
from tests.system.server import Server, serving


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One proxy, one prefill and one decode worker with a secret, shared by tests that do no harm to it."""
    secret = tmp_path_factory.mktemp("system") / "secret"
    Secret.new().save(str(secret))
    with serving("--secret-file", str(secret)) as server:
        yield server
