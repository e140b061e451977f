"""Nodes that do not reach each other for a while, under load: what has nothing to do with them goes on."""

import asyncio

import pytest

from tests.faults.support import case
from tests.faults.waiting import eventually
from tests.netns.town import (
    NOTICED_WITHIN_S,
    PAIRS,
    USED_WITHIN_S,
    Town,
    Visitor,
    assert_equal,
    assert_others_undisturbed,
)

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_a_worker_whose_node_is_unplugged_is_replaced_and_used_again(
    town: Town, visitor: Visitor, name: str
) -> None:
    pid = town.cluster[name].pid
    async with visitor.asking(seed=1):
        await visitor.is_told(6)
        with town.network.unplugged(name):
            await town.loses(name)
            await visitor.is_told(10)
    assert_others_undisturbed(visitor.told, name)
    await town.cluster.ready()
    await visitor.meets(*(pair for pair in PAIRS if name in pair), seed=100)
    assert town.cluster[name].pid == pid


async def test_two_workers_that_do_not_reach_each_other_both_serve_with_others(
    town: Town, visitor: Visitor
) -> None:
    async def failed() -> float:
        counters: dict[str, float] = (await town.cluster.workers())["p1"]["counters"]
        return sum(count for name, count in counters.items() if name.startswith("transfers_failed_total"))

    async def more_failed() -> bool:
        return await failed() > failed_before

    failed_before = await failed()
    async with visitor.asking(seed=2):
        await visitor.is_told(6)
        with town.network.apart("p1", "d1"):
            await eventually(more_failed, USED_WITHIN_S, "a transfer from p1 fails, and that is told")
            assert await town.knows("p1") and await town.knows("d1")
    assert_others_undisturbed(visitor.told, "p1", "d1")
    await visitor.meets(("p1", "d1"), seed=200)


@pytest.mark.slow
async def test_a_decode_worker_that_only_the_proxy_does_not_reach_is_replaced(
    town: Town, visitor: Visitor
) -> None:
    async with visitor.asking(seed=3):
        await visitor.is_told(6)
        with town.network.apart("proxy", "d1"):
            await town.loses("d1")
            await visitor.is_told(10)
    assert_others_undisturbed(visitor.told, "d1")
    await town.cluster.ready()
    await visitor.meets(("p1", "d1"), ("p2", "d1"), seed=300)


@pytest.mark.slow
async def test_a_slow_link_delays_only_what_goes_over_it(town: Town, visitor: Visitor) -> None:
    """The largest prompt is 900 KiB of keys and values."""

    async def receives() -> bool:
        return bool((await town.cluster.workers())["d1"]["load"]["num_receiving"])

    with town.network.slowed("d1", "1mbit"):
        large = [asyncio.create_task(visitor.ask(case(900, 4, seed))) for seed in range(400, 404)]
        await eventually(receives, NOTICED_WITHIN_S, "one of them goes to d1")
        small = [asyncio.create_task(visitor.ask(case(40, 4, seed))) for seed in range(410, 418)]
        await asyncio.wait(small)
    await asyncio.wait(large)
    assert_equal(visitor.told)
    ways = [(len(each.case.prompt), each.pair[1]) for each in visitor.told]
    assert ways.index((40, "d2")) < max(at for at, way in enumerate(ways) if way == (900, "d1")), ways
