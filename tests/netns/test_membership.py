"""Nodes that come, go and move while requests run."""

import asyncio
import signal

import pytest

from tests.netns.town import PAIRS, Town, Visitor, assert_equal, assert_others_undisturbed

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]


async def test_every_pair_of_nodes_serves(town: Town, visitor: Visitor) -> None:
    await visitor.meets(*PAIRS, seed=1000)
    assert_equal(visitor.told)
    workers = await town.cluster.workers()
    for name in ("d1", "d2"):
        assert workers[name]["address"].startswith(f"zmq+tcp://{town.network.home(name).address}:")


async def test_a_node_that_joins_at_run_time_is_used_and_leaves_unnoticed(
    town: Town, visitor: Visitor
) -> None:
    async with visitor.asking(seed=11):
        await join_and_leave(town, visitor, "d3", (("p1", "d3"), ("p2", "d3")))
    assert_equal(visitor.told)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_twenty_nodes_of_both_roles_join_and_leave_unnoticed(town: Town, visitor: Visitor) -> None:
    async with visitor.asking(seed=13):
        for _ in range(10):
            await join_and_leave(town, visitor, "d3", (("p1", "d3"),))
            await join_and_leave(town, visitor, "p3", (("p3", "d1"),))
    assert_equal(visitor.told)


async def join_and_leave(town: Town, visitor: Visitor, name: str, pairs: tuple[tuple[str, str], ...]) -> None:
    with town.cluster.extra(name, []) as process:
        await town.cluster.ready()
        await visitor.meets(*pairs, seed=1100)
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0
        await visitor.is_told(6)


@pytest.mark.slow
async def test_a_worker_that_comes_back_at_another_address_is_found_there(
    town: Town, visitor: Visitor
) -> None:
    async with visitor.asking(seed=12):
        await visitor.is_told(6)
        address = town.move("d1")
        await town.cluster.ready()
        await visitor.meets(("p1", "d1"), ("p2", "d1"), seed=1200)
    assert_others_undisturbed(visitor.told, "d1")
    assert (await town.cluster.workers())["d1"]["address"].startswith(f"zmq+tcp://{address}:")
