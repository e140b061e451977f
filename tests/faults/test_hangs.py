"""Cases HNG: nothing waits for ever, and nobody waits for what nobody wants."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.client import Client, body_of
from tests.faults.cluster import Cluster, running
from tests.faults.conftest import MAX_MODEL_LEN, SMALL
from tests.faults.load import Load, Mix, draw_cases
from tests.faults.looking import load_of, receives, runs_on, total
from tests.faults.oracle import Oracle
from tests.faults.relay import Faults
from tests.faults.support import ask, ask_all, assert_equal, assert_never_wrong, case, cases
from tests.faults.waiting import eventually

FREE_WITHIN_S = 10.0  # the promise is about two; this machine may be busy


@pytest.mark.parametrize(
    "request_id", ["", "abc", "x" * 300, "frühstück-東京", "a/b?c=d&e", "a.b.c.0", "id with spaces"]
)
async def test_any_request_id_is_served_and_given_back(
    cluster: Cluster, client: Client, oracle: Oracle, request_id: str
) -> None:
    """HNG-01."""
    asked = case(40, 6, seed=len(request_id))
    headers = {b"x-request-id": request_id.encode()} if request_id else {}
    response = await client.http.post(
        "/v1/completions", json=body_of(asked, stream=False) | {"request_id": request_id}, headers=headers
    )
    assert response.json()["choices"][0]["token_ids"] == list(oracle.reference(asked).token_ids)
    given = dict(response.headers.raw)[b"x-request-id"]
    assert given == request_id.encode() if request_id else given


async def test_decode_workers_free_what_they_hold_for_dead_prefill_workers(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """HNG-02."""
    for name in ("d1", "d2"):
        cluster.relays[name].set(forward=Faults(bytes_per_s=200_000))
    asked = cases(6, 500, 6, seed=22)
    asking = asyncio.create_task(ask_all(client, oracle, asked))

    async def receiving() -> int:
        return sum(load["num_receiving"] for load in (await load_of(cluster, "decode")).values())

    await eventually(receiving, 20.0)
    for name in ("p1", "p2"):
        cluster.kill(name)

    async def let_go() -> bool:
        return await receiving() == 0

    await eventually(let_go, FREE_WITHIN_S)
    assert_equal(await ask(client, oracle, case(50, 4, seed=23)))
    assert_never_wrong(*await asking)


async def test_load_beyond_capacity_keeps_moving(cluster: Cluster, client: Client, oracle: Oracle) -> None:
    """HNG-03, for seconds."""
    await keeps_moving(cluster, client, oracle, seconds=5.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_load_beyond_capacity_keeps_moving_for_minutes(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """HNG-03."""
    await keeps_moving(cluster, client, oracle, seconds=600.0)


async def keeps_moving(cluster: Cluster, client: Client, oracle: Oracle, seconds: float) -> None:
    mix = Mix(leave_share=0.0)
    load = Load(client, oracle, draw_cases(3, 80, mix), mix, num_clients=48, seed=3)
    ends_at = asyncio.get_running_loop().time() + seconds
    seen = -1.0

    async def moved() -> bool:
        nonlocal seen
        now = await total(cluster, "generation_tokens_total", "decode")
        before, seen = seen, now
        return now > before

    try:
        while asyncio.get_running_loop().time() < ends_at:
            await eventually(moved, 10.0, "tokens come", pause_s=0.5)
    finally:
        score = await load.stop()
    assert score.verdicts.total() > 0
    assert not score.examples


async def test_four_largest_prompts_into_room_for_one_all_finish(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """HNG-04: each takes its room whole before anything is sent, so none waits for another's rest."""
    decode = ["--num-blocks=76"]  # 1.2 times the largest prompt below
    async with running(tmp_path, str(model), options=SMALL, decode_options=decode) as cluster:
        async with Client(cluster.url) as client:
            for round_ in range(3):
                asked = [case(1000, 4, seed=400 + 10 * round_ + index) for index in range(4)]
                assert_equal(*await ask_all(client, oracle, asked, at_once=4))
        await cluster.quiet()


@pytest.mark.parametrize("moment", ["queued", "transfer"])
async def test_work_ends_when_the_client_leaves(
    cluster: Cluster, client: Client, oracle: Oracle, moment: str
) -> None:
    """HNG-05: what was under way is dropped on both sides, and the next client does not wait for it."""
    if moment == "queued":  # for one that stands still, or is slow
        for name in ("p1", "p2"):
            cluster.stop(name)
    else:
        for name in ("d1", "d2"):
            cluster.relays[name].set(forward=Faults(bytes_per_s=50_000))
    before = await total(cluster, "generation_tokens_total", "decode")
    asked = [case(100, 900, seed=500 + index) for index in range(4)]
    leaving = [asyncio.create_task(client.complete(each, stream=True)) for each in asked]
    await (runs_on(cluster, "prefill") if moment == "queued" else receives(cluster))
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    cluster.repair()
    await cluster.quiet(FREE_WITHIN_S)
    assert await total(cluster, "generation_tokens_total", "decode") - before < 900 * len(asked)
    assert_equal(await ask(client, oracle, case(20, 4, seed=599)))


async def test_work_ends_when_the_client_of_a_stream_leaves(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """HNG-05."""
    before = await total(cluster, "generation_tokens_total", "decode")
    async with client.streaming(case(100, 900, seed=510)) as stream:
        await stream.read(5)
    await cluster.quiet(FREE_WITHIN_S)
    assert await total(cluster, "generation_tokens_total", "decode") - before < 850
    assert_equal(await ask(client, oracle, case(20, 4, seed=599)))


async def test_work_ends_when_a_client_without_a_stream_leaves(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """HNG-06."""
    before = await total(cluster, "generation_tokens_total", "decode")
    asking = asyncio.create_task(client.complete(case(30, 900, seed=6)))
    worker = await runs_on(cluster, "decode")
    asking.cancel()
    await asyncio.wait([asking])

    async def told() -> bool:
        return not int((await cluster.workers())[worker]["attempts"])

    await eventually(told, FREE_WITHIN_S)
    await cluster.quiet(FREE_WITHIN_S)
    assert await total(cluster, "generation_tokens_total", "decode") - before < 800


async def test_a_burst_right_after_the_start_is_served(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """HNG-07."""
    await cold_burst(model, oracle, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prefill", [1, 2])
async def test_bursts_after_many_starts_are_served(
    model: Path, oracle: Oracle, tmp_path: Path, prefill: int
) -> None:
    """HNG-07."""
    for turn in range(20):
        await cold_burst(model, oracle, tmp_path / str(turn), prefill)


async def cold_burst(model: Path, oracle: Oracle, directory: Path, prefill: int = 1) -> None:
    asked = cases(16, (100, 300), 6, seed=7)
    oracle.references(asked)
    cluster = running(directory, str(model), prefill=prefill, decode=2, options=SMALL)
    async with cluster as started, Client(started.url) as client:
        assert_equal(*await ask_all(client, oracle, asked, at_once=16))


async def test_a_stopped_prefill_worker_delays_its_own_requests_only(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """HNG-08."""
    asked = cases(24, (50, 300), 8, seed=81)
    oracle.references(asked)
    cluster.stop("p1")
    assert_equal(*await ask_all(client, oracle, asked))
    assert (await cluster.get("/ready")).status_code == 200
    cluster.cont("p1")


async def test_a_blackholed_decode_worker_delays_its_own_requests_only(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """HNG-08: its port swallows everything, while its heartbeats say that all is well."""
    asked = cases(24, (50, 300), 8, seed=82)
    oracle.references(asked)
    cluster.relays["d1"].set(Faults(blackhole="drop"), Faults(blackhole="drop"))
    assert_equal(*await ask_all(client, oracle, asked))
    assert (await cluster.get("/ready")).status_code == 200


@pytest.mark.parametrize("name", ["p1", "d1", "proxy"])
@pytest.mark.parametrize("under_load", [False, True])
async def test_any_process_restarts_alone(
    cluster: Cluster, client: Client, oracle: Oracle, name: str, under_load: bool
) -> None:
    """HNG-09: the others keep their pids, and requests are served again without touching them."""
    pids = {other: pid for other, pid in cluster.pids.items() if other != name}
    asking = asyncio.create_task(ask_all(client, oracle, cases(16, (50, 400), 60, seed=9), at_once=8))
    if not under_load:
        await asking
    else:
        await runs_on(cluster, "decode")
    cluster.restart(name)
    answers = await asking
    assert_never_wrong(*answers)
    if name != "proxy":
        assert_equal(*answers)
    await cluster.ready()
    assert pids == {other: pid for other, pid in cluster.pids.items() if other != name}
    async with Client(cluster.url) as fresh:
        assert_equal(*await ask_all(fresh, oracle, cases(6, (50, 200), 6, seed=99)))


async def test_prompts_that_no_pool_can_hold_are_refused_at_once(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """HNG-10: a pool smaller than the context, on the prefill and on the decode side."""
    options = {
        "options": SMALL, "prefill_options": ["--num-blocks=40"], "decode_options": ["--num-blocks=24"],
    }  # fmt: skip
    async with running(tmp_path, str(model), **options) as cluster, Client(cluster.url) as client:
        for length in (MAX_MODEL_LEN - 100, 500):
            refused = await client.complete(case(length, 8))
            assert refused.status == 400
            assert "token" in refused.error
        assert_equal(await ask(client, oracle, case(200, 8)))
        await cluster.quiet()
