"""Cases MEM: what is held comes back, and what is too little is told."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.faults.client import Client
from tests.faults.cluster import Cluster, Usage, running
from tests.faults.conftest import MAX_MODEL_LEN, SMALL
from tests.faults.looking import load_of, receives, runs_on, total
from tests.faults.oracle import Oracle
from tests.faults.relay import Faults
from tests.faults.support import ask, ask_all, assert_equal, assert_never_wrong, case, cases
from tests.faults.waiting import eventually

DECODE = ("d1", "d2")
GROWTH_BYTES = 64 << 20  # of a process that allocates as it goes, not of one that queues without end


def assert_no_growth(before: dict[str, Usage], after: dict[str, Usage], fds: int = 40) -> None:
    for name, usage in after.items():
        assert usage.num_fds <= before[name].num_fds + fds, name
        assert usage.num_threads <= before[name].num_threads + 4, name
        assert usage.rss_bytes <= before[name].rss_bytes + GROWTH_BYTES, name


async def test_prefill_blocks_come_back_when_their_decode_workers_die(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """MEM-01: computed prompts that nobody takes any more hold nothing."""
    for name in DECODE:
        cluster.relays[name].set(forward=Faults(blackhole="stall"))
    asking = asyncio.create_task(ask_all(client, oracle, cases(6, 400, 4, seed=1)))

    async def parked() -> bool:
        return any(load["num_parked_blocks"] for load in (await load_of(cluster, "prefill")).values())

    await eventually(parked, 20.0)
    for name in DECODE:
        cluster.kill(name)

    async def free() -> bool:
        loads = (await load_of(cluster, "prefill")).values()
        return all(load["num_free_blocks"] == load["num_blocks"] for load in loads)

    await eventually(free, 10.0)
    cluster.repair()
    assert_never_wrong(*await asking)
    await cluster.ready()
    assert_equal(await ask(client, oracle, case(MAX_MODEL_LEN - 8, 8, seed=11)))


async def test_decode_blocks_come_back_when_transfer_and_client_end_together(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """MEM-02: by a cut connection in most turns, by a killed prefill worker in the last."""
    source = random.Random(2)
    for turn in range(12):
        for name in DECODE:
            cluster.relays[name].set(forward=Faults(bytes_per_s=500_000))
        asked = [case(500, 300, seed=2000 + 10 * turn + index) for index in range(3)]
        leaving = [asyncio.create_task(client.complete(each, stream=True)) for each in asked]
        receiving = asyncio.create_task(receives(cluster))
        # A worker that failed often is left out for a while: then there is nothing to receive.
        await asyncio.wait([receiving, *leaving], timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
        receiving.cancel()
        await asyncio.sleep(source.uniform(0.0, 0.3))
        for name in DECODE:
            cluster.relays[name].cut()
        if turn == 11:
            cluster.kill("p1")
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
    cluster.repair()
    await cluster.ready()
    await cluster.quiet()
    assert_equal(*await ask_all(client, oracle, [case(MAX_MODEL_LEN - 8, 8, seed=21 + i) for i in range(2)]))


async def test_output_that_no_pool_can_hold_harms_nobody(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """MEM-03, and MEM-04: what one pool cannot hold for all at once is preempted, and goes on equal."""
    decode = ["--num-blocks=40"]
    async with running(tmp_path, str(model), options=SMALL, decode_options=decode) as cluster:
        async with Client(cluster.url) as client:
            pids = cluster.pids
            outgrows = await client.complete(case(590, 500, seed=3))
            assert outgrows.status == 400 or outgrows.finish_reason == "length", outgrows
            asked = cases(12, (20, 60), 120, seed=4)  # three times what there is
            assert_equal(*await ask_all(client, oracle, asked, at_once=12))
            assert await total(cluster, "preemptions_total", "decode") > 0
            assert_equal(await ask(client, oracle, case(590, 8, seed=31)))
            assert cluster.pids == pids
        await cluster.quiet()


async def test_cancelled_rounds_leave_the_pools_as_they_were(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """MEM-05."""
    await cancel_rounds(cluster, client, oracle, rounds=3, at_once=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_cancelled_rounds_leave_the_pools_as_they_were(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """MEM-05."""
    await cancel_rounds(cluster, client, oracle, rounds=20, at_once=100)


async def cancel_rounds(cluster: Cluster, client: Client, oracle: Oracle, rounds: int, at_once: int) -> None:
    source = random.Random(5)
    for turn in range(rounds):
        asked = cases(at_once, (300, 900), 8, seed=50 + turn)
        asking = [asyncio.create_task(client.complete(each, stream=True)) for each in asked]
        await asyncio.sleep(source.uniform(0.1, 1.0))
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await cluster.quiet()
        assert_equal(await ask(client, oracle, case(200, 4, seed=500 + turn)))


@pytest.mark.parametrize(
    "options",
    [
        ["--no-enable-prefix-caching", "--no-checksums", "--block-size=1", "--num-blocks=512"],
        ["--max-num-seqs=1", "--max-num-batched-tokens=1", "--max-parked-fraction=1", "--piece-bytes=1024"],
    ],
)
async def test_workers_live_on_after_a_request_whatever_their_options(
    model: Path, oracle: Oracle, tmp_path: Path, options: list[str]
) -> None:
    """MEM-06: the books are checked after each step."""
    async with running(tmp_path, str(model), options=[*SMALL, *options]) as cluster:
        pids = cluster.pids
        async with Client(cluster.url) as client:
            assert_equal(*await ask_all(client, oracle, cases(4, (20, 60), 8, seed=6), at_once=2))
        await cluster.quiet()
        assert all(process.alive for process in cluster.processes.values())
        assert cluster.pids == pids


@pytest.mark.parametrize("stopped", ["d1", "proxy"])
async def test_nobody_queues_without_end_for_who_does_not_read(
    cluster: Cluster, client: Client, oracle: Oracle, stopped: str
) -> None:
    """MEM-07."""
    before = cluster.usage()
    asking = asyncio.create_task(ask_all(client, oracle, cases(40, (100, 500), 40, seed=7), at_once=20))
    await runs_on(cluster, "decode")
    cluster.stop(stopped)
    await asyncio.sleep(4.0)
    during = cluster.usage()
    cluster.cont(stopped)
    assert_never_wrong(*await asking)
    assert_no_growth(before, during, fds=80)
    assert_equal(*await ask_all(client, oracle, cases(6, 60, 6, seed=77)))


async def test_a_client_that_does_not_read_costs_no_memory(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """MEM-07."""
    before = cluster.usage()
    async with client.streaming(case(20, 900, seed=78)):
        assert_equal(*await ask_all(client, oracle, cases(10, 60, 20, seed=79)))
    await cluster.quiet()
    assert_no_growth(before, cluster.usage())


async def test_requests_and_restarts_leave_no_handles_behind(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """MEM-08."""
    await churn(cluster, client, oracle, requests=100, restarts=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_many_requests_and_restarts_leave_no_handles_behind(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """MEM-08."""
    await churn(cluster, client, oracle, requests=2000, restarts=30)


async def churn(cluster: Cluster, client: Client, oracle: Oracle, requests: int, restarts: int) -> None:
    """Of p1 and d1, while p2, d2 and the proxy see them come and go."""
    asked = cases(requests // (restarts + 1), (10, 200), 4, seed=8)
    assert_equal(*await ask_all(client, oracle, asked))
    before = cluster.usage()
    for turn in range(restarts):
        cluster.restart("p1" if turn % 2 else "d1")
        assert_equal(*await ask_all(client, oracle, asked))
        await cluster.ready()
    await cluster.quiet()
    after = cluster.usage()
    for name in ("p2", "d2", "proxy"):
        assert after[name].num_fds <= before[name].num_fds + 16, name
        assert after[name].num_threads <= before[name].num_threads + 2, name
        assert after[name].num_mappings <= before[name].num_mappings + 60, name


async def test_few_file_descriptors_are_enough(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """MEM-08: with 128 at most, more clients than that are served or refused."""
    async with running(tmp_path, str(model), options=SMALL, max_fds=128) as cluster:
        async with Client(cluster.url) as client:
            assert_never_wrong(*await ask_all(client, oracle, cases(150, (5, 60), 2, seed=9), at_once=150))
        async with Client(cluster.url) as client:
            assert_equal(*await ask_all(client, oracle, cases(8, (20, 100), 4, seed=91)))
        assert all(process.alive for process in cluster.processes.values())
