"""Cases FAI: what happens when something dies, leaves, lies or is shut down."""

import asyncio
import itertools
import random
import signal
import time

import pytest

from tests.faults.client import Client, Verdict, body_of, judge
from tests.faults.cluster import Cluster, Usage
from tests.faults.looking import receives, runs_on
from tests.faults.oracle import Oracle
from tests.faults.relay import Address, Faults, Relay
from tests.faults.support import ask, ask_all, assert_equal, case, cases
from tests.faults.waiting import eventually

MAX_ATTEMPTS = 4  # the proxy's default


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_killed_worker_is_not_noticed_by_clients(
    cluster: Cluster, client: Client, oracle: Oracle, role: str
) -> None:
    """FAI-01: it is started at once on the same address, sooner than any heartbeat could miss it."""
    others = {name: pid for name, pid in cluster.pids.items() if name != f"{role}1"}
    asking = asyncio.create_task(ask_all(client, oracle, cases(32, (50, 500), 100, seed=1)))
    await runs_on(cluster, "decode")
    cluster.restart(f"{role}1")
    assert_equal(*await asking)
    await cluster.ready()
    assert_equal(*await ask_all(client, oracle, cases(12, (50, 300), 8, seed=101)))
    assert others == {name: pid for name, pid in cluster.pids.items() if name != f"{role}1"}


async def test_decode_workers_stay_well_when_prefill_workers_die(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """FAI-02."""
    pids = {name: cluster[name].pid for name in ("d1", "d2", "proxy")}
    asking = asyncio.create_task(ask_all(client, oracle, cases(10, (300, 600), 200, seed=2), at_once=10))
    await runs_on(cluster, "decode")
    for name in ("p1", "p2"):
        cluster.kill(name)
    for _ in range(10):
        assert (await cluster.get("/live", timeout_s=5.0)).status_code == 200
        workers = await cluster.workers()
        assert all(workers[name]["state"] == "ready" for name in ("d1", "d2"))
    assert_equal(*await asking)
    assert pids == {name: cluster[name].pid for name in pids}


@pytest.mark.parametrize("place", ["nobody listens", "speaks HTTP", "swallows everything"])
async def test_a_decode_worker_with_a_wrong_address_costs_no_request(
    cluster: Cluster, client: Client, oracle: Oracle, place: str
) -> None:
    """FAI-03: it is tried, found wanting and left out; it keeps its pid."""
    port = int((await cluster.workers())["d1"]["address"].rpartition(":")[2])
    wrong = Address("127.0.0.3", port)
    target = Address("127.0.0.1", 1 if place == "nobody listens" else cluster.http_port)
    with Relay(target, wrong) as relay:
        if place == "swallows everything":
            relay.set(Faults(blackhole="drop"), Faults(blackhole="drop"))
        options = [
            f"--advertise-host={wrong.host}",
            f"--bind-host={wrong.host[:-1]}4",
            f"--transfer-port={port}",
        ]
        with cluster.extra("d3", options) as process:
            await cluster.ready()
            pid = process.pid
            seeds = itertools.count(300)

            async def tried() -> bool:
                assert_equal(*await ask_all(client, oracle, cases(24, (50, 200), 6, seed=next(seeds))))
                return relay.counts["connections"] > 0

            await eventually(tried, 90.0, "it is tried")
            assert process.alive and process.pid == pid


async def test_clients_leaving_at_any_moment_harm_nobody(cluster: Cluster) -> None:
    """FAI-04."""
    await leave_at_random(cluster, at_random=150, at_the_end=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_thousand_clients_leaving_harm_nobody(cluster: Cluster) -> None:
    """FAI-04."""
    await leave_at_random(cluster, at_random=2000, at_the_end=200)


async def leave_at_random(cluster: Cluster, at_random: int, at_the_end: int) -> None:
    async with Client(cluster.url) as client:  # opens what is opened once
        await asyncio.gather(*(client.complete(each) for each in cases(16, 60, 4, seed=45)))
    pids, before = cluster.pids, cluster.usage()
    async with Client(cluster.url) as client:
        source, gate = random.Random(4), asyncio.Semaphore(12)

        async def leave(index: int) -> None:
            asked = case(source.randrange(1, 400), 24, seed=4000 + index % 40)
            async with gate:
                asking = asyncio.create_task(client.complete(asked, stream=bool(index % 2)))
                await asyncio.wait([asking], timeout=source.uniform(0.0, 0.6))
                asking.cancel()
                await asyncio.wait([asking])

        async def leave_with_the_last_token(index: int) -> None:
            async with gate, client.streaming(case(30, 12, seed=4500 + index % 10)) as stream:
                await stream.read(11)

        await asyncio.gather(*(leave(index) for index in range(at_random)))
        await asyncio.gather(*(leave_with_the_last_token(index) for index in range(at_the_end)))
    await cluster.quiet()
    assert cluster.pids == pids
    gives_up_at = time.monotonic() + 10.0
    while (growth := grown(before, cluster.usage())) and time.monotonic() < gives_up_at:
        await asyncio.sleep(0.2)  # connections of clients that left are closing
    assert not growth


def grown(before: dict[str, Usage], after: dict[str, Usage]) -> list[str]:
    """Processes that hold more than a few connections opened on first use."""
    return [
        f"{name}: {before[name]} -> {usage}"
        for name, usage in after.items()
        if usage.num_fds > before[name].num_fds + 16 or usage.num_threads > before[name].num_threads + 6
    ]


@pytest.mark.parametrize("deed", ["kill", "stop"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_readiness_tells_which_role_is_missing(cluster: Cluster, deed: str, role: str) -> None:
    """FAI-05: and liveness stays, and both are well again by themselves."""
    names = [f"{role[0]}1", f"{role[0]}2"]
    for name in names:
        (cluster.kill if deed == "kill" else cluster.stop)(name)

    async def tells() -> bool:
        response = await cluster.get("/ready")
        # Decode workers stand in for prefill workers, so requests are served without these.
        expected = (200 if role == "prefill" else 503, [role])
        return bool((response.status_code, response.json()["missing"]) == expected)

    await eventually(tells, 10.0, f"/ready names {role}")
    assert (await cluster.get("/live")).status_code == 200
    cluster.repair()
    await cluster.ready()
    response = await cluster.get("/ready")
    assert response.status_code == 200 and not response.json()["missing"]


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_sigterm_lets_a_worker_finish_what_it_has(
    cluster: Cluster, client: Client, oracle: Oracle, name: str
) -> None:
    """FAI-06: with requests in every phase, none fails, and the worker ends with exit code 0."""
    cluster.relays["d1"].set(forward=Faults(bytes_per_s=5e6))
    asking = asyncio.create_task(ask_all(client, oracle, cases(24, (100, 500), 40, seed=6), at_once=12))
    await runs_on(cluster, "decode")
    cluster[name].signal(signal.SIGTERM)
    assert_equal(*await asking)
    assert await asyncio.to_thread(cluster[name].wait) == 0


async def test_a_second_sigterm_ends_a_worker_at_once(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """FAI-06: what it had goes on elsewhere."""
    for name in ("d1", "d2"):
        cluster.relays[name].set(forward=Faults(bytes_per_s=20_000))  # it would drain for long
    asking = asyncio.create_task(ask_all(client, oracle, cases(4, 800, 4, seed=66)))
    victim = await receives(cluster)
    cluster[victim].signal(signal.SIGTERM)

    async def draining() -> bool:
        return str((await cluster.workers())[victim]["state"]) == "draining"

    await eventually(draining, 10.0)
    cluster[victim].signal(signal.SIGTERM)
    assert await asyncio.to_thread(cluster[victim].wait) == -signal.SIGTERM
    cluster.repair()
    assert_equal(*await asking)


async def test_every_process_in_turn_restarts_under_load_without_an_error(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """FAI-06: a rolling restart of the workers."""
    asked = cases(10, (50, 400), 24, seed=61)
    oracle.references(asked)
    stopping = asyncio.Event()

    async def ask_on() -> None:
        while not stopping.is_set():
            assert_equal(*await ask_all(client, oracle, asked, at_once=4))

    asking = asyncio.create_task(ask_on())
    for name in ("p1", "d1", "p2", "d2"):
        cluster[name].signal(signal.SIGTERM)
        assert await asyncio.to_thread(cluster[name].wait) == 0
        cluster[name].start()
        await cluster.ready()
    stopping.set()
    await asking


async def test_decode_workers_that_die_before_the_first_byte_are_not_noticed(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """FAI-07."""
    for name in ("p1", "p2"):
        cluster.stop(name)
    asking = asyncio.create_task(ask_all(client, oracle, cases(4, 60, 12, seed=70)))

    async def dispatched() -> bool:
        return sum(int(worker["attempts"]) for worker in (await cluster.workers()).values()) >= 4

    await eventually(dispatched, 10.0)
    for name in ("d1", "d2"):
        cluster.restart(name)
    for name in ("p1", "p2"):
        cluster.cont(name)
    assert_equal(*await asking)


@pytest.mark.parametrize(("num_seen", "temperature"), [(1, 0.0), (40, 0.0), (40, 1.0)])
async def test_a_stream_goes_on_when_its_decode_worker_dies(
    cluster: Cluster, client: Client, oracle: Oracle, num_seen: int, temperature: float
) -> None:
    """FAI-07: no token twice, none left out."""
    asked = case(60, 900, seed=7000 + num_seen, temperature=temperature)
    async with client.streaming(asked, timings=True) as stream:
        await stream.read(num_seen)
        for name in ("d1", "d2"):  # else it may be over before we know who has it
            cluster.stop(name)
        cluster.restart(await runs_on(cluster, "decode"))
        cluster.repair()
        reply = await stream.finish()
    assert judge(reply, oracle.reference(asked)) is Verdict.EQUAL, reply.error
    assert 2 <= reply.timings["num_attempts"] <= MAX_ATTEMPTS


async def test_choices_logprobs_and_stop_strings_go_on_when_a_decode_worker_dies(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """FAI-07: what is put together over attempts is what one attempt gives."""
    asked = case(80, 800, seed=7200, temperature=1.0)
    text = (await client.complete(asked)).text
    body = body_of(asked, stream=False) | {"n": 2, "logprobs": 2, "stop": text[600:604]}
    undisturbed = (await client.http.post("/v1/completions", json=body)).json()
    asking = asyncio.create_task(client.http.post("/v1/completions", json=body))
    victim = await runs_on(cluster, "decode")
    cluster.restart(victim)
    disturbed = (await asking).json()
    assert undisturbed["usage"]["completion_tokens"] == disturbed["usage"]["completion_tokens"]
    for one, other in zip(undisturbed["choices"], disturbed["choices"], strict=True):
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        assert one["token_ids"] == other["token_ids"]
        assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        assert one["logprobs"]["token_logprobs"] == other["logprobs"]["token_logprobs"]
    assert undisturbed["choices"][0]["finish_reason"] == "stop"


async def test_without_decode_workers_streams_and_requests_end_with_an_error(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """FAI-07, FAI-08: in bounded time; what came before the error is right; and it passes."""
    asked = case(60, 900, seed=7100)
    async with client.streaming(asked) as stream:
        await stream.read(5)
        for name in ("d1", "d2"):
            cluster.kill(name)
        refused, reply = await asyncio.gather(client.complete(case(50, 8)), stream.finish())
    assert judge(reply, oracle.reference(asked)) is Verdict.ERROR
    assert "decode" in reply.error
    assert (refused.status, refused.hung) == (503, False)
    assert "decode" in refused.error
    cluster.repair()
    await cluster.ready()
    assert_equal(await ask(client, oracle, case(50, 8)))


async def test_decode_workers_stand_in_while_no_prefill_worker_is_there(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """FAI-08: it is counted, and stops when prefill workers are back."""
    for name in ("p1", "p2"):
        cluster.kill(name)

    async def gone() -> bool:
        return not {"p1", "p2"} & (await cluster.workers()).keys()

    await eventually(gone, 10.0)
    before = await fallbacks(cluster)
    asked = cases(6, (50, 300), 8, seed=8)
    assert_equal(*await ask_all(client, oracle, asked))
    assert await fallbacks(cluster) - before == len(asked)
    cluster.repair()
    await cluster.ready()
    before = await fallbacks(cluster)
    assert_equal(*await ask_all(client, oracle, cases(6, (50, 300), 8, seed=88)))
    assert await fallbacks(cluster) == before


async def fallbacks(cluster: Cluster) -> float:
    return (await cluster.metrics()).get('baton_dispatched_total{path="fallback"}', 0.0)
