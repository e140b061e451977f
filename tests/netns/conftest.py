"""One town for all tests of this folder: a proxy, two prefill and two decode workers on five nodes."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.faults import tiny_model
from tests.faults.client import Client
from tests.faults.oracle import Oracle
from tests.netns import network
from tests.netns.town import Town, Visitor

START_S = 180.0


@pytest.fixture(scope="package")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    if reason := network.why_not():
        pytest.skip(f"no network namespaces: {reason}")
    directory = tmp_path_factory.mktemp("town")
    model = tiny_model.write(directory / "tiny")
    town = Town(directory, Oracle(model), model)
    try:
        town.cluster.start()
        asyncio.run(town.cluster.ready(START_S))
        yield town
    finally:
        town.close()


@pytest.fixture
async def town(built: Town) -> AsyncIterator[Town]:
    """Each test gets it whole, and leaves it so that everybody is there and holds nothing."""
    await built.cluster.ready()
    yield built
    await built.cluster.ready()
    await built.cluster.quiet()


@pytest.fixture
async def visitor(town: Town) -> AsyncIterator[Visitor]:
    async with Client(town.cluster.url) as client:
        yield Visitor(town, client)
