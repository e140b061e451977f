"""Deadlines through every queue, and what happens when queues are full."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.client import Client, Verdict, body_of
from tests.faults.cluster import Cluster, running
from tests.faults.conftest import SMALL
from tests.faults.looking import load_of
from tests.faults.oracle import Oracle
from tests.faults.relay import Faults
from tests.faults.support import ask, ask_all, assert_equal, assert_never_wrong, case, cases, tally
from tests.faults.waiting import eventually

TOLERANCE_S = 10.0  # beyond the deadline, on a busy machine


@pytest.mark.parametrize("moment", ["on its way to a stopped worker", "in transfer"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_with_its_deadline_wherever_it_is(
    cluster: Cluster, client: Client, oracle: Oracle, moment: str, stream: bool
) -> None:
    if moment == "in transfer":
        for name in ("d1", "d2"):
            cluster.relays[name].set(forward=Faults(bytes_per_s=20_000))
    else:
        for name in ("p1", "p2"):
            cluster.stop(name)
    client.timeout_s = 1.0 + TOLERANCE_S
    reply = await client.complete(case(600, 8, seed=1), stream, timeout_s=1.0)
    assert not reply.hung
    assert reply.error
    if not reply.token_ids:
        assert reply.status == 504
    cluster.repair()
    await cluster.ready()
    await cluster.quiet()


async def test_a_stream_ends_with_its_deadline_and_says_so(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    asked = case(60, 900, seed=2)
    async with client.streaming(asked, timeout_s=2.0) as stream:
        await stream.read(3)
        for name in ("d1", "d2"):
            cluster.stop(name)
        reply = await stream.finish()
    assert reply.error and not reply.hung
    assert reply.token_ids == list(oracle.reference(asked).token_ids[: len(reply.token_ids)])
    cluster.repair()
    await cluster.ready()
    await cluster.quiet()


async def test_more_requests_than_decode_places_are_all_served(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """A burst waits in order; it is not timed out by accident."""
    options = {"options": SMALL, "decode_options": ["--max-num-seqs=2"]}
    async with running(tmp_path, str(model), **options) as cluster, Client(cluster.url) as client:
        assert_equal(*await ask_all(client, oracle, cases(60, (10, 200), 12, seed=3), at_once=60))
        await cluster.quiet()


async def test_a_full_proxy_refuses_at_once_and_says_when_to_come_back(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    options = {"options": SMALL, "proxy_options": ["--max-queued-requests=4"]}
    async with running(tmp_path, str(model), **options) as cluster, Client(cluster.url) as client:
        cluster.stop("d1")  # what is under way stays there
        waiting = asyncio.create_task(ask_all(client, oracle, cases(4, 60, 8, seed=4), at_once=4))

        async def full() -> bool:
            return sum(int(w["attempts"]) for w in (await cluster.workers()).values()) >= 4

        await eventually(full, 10.0)
        refused = await client.http.post("/v1/completions", json=body_of(case(60, 8, seed=44), False))
        cluster.cont("d1")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert_equal(*await waiting)
        assert_equal(await ask(client, oracle, case(60, 8, seed=44)))


async def test_full_workers_refuse_and_keep_what_they_have(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    options = {"options": [*SMALL, "--max-waiting-seqs=2", "--max-num-seqs=2"]}
    async with running(tmp_path, str(model), **options) as cluster, Client(cluster.url) as client:
        answers = await ask_all(client, oracle, cases(60, (200, 600), 20, seed=5), at_once=60)
        assert_never_wrong(*answers)
        verdicts = tally(answers)
        # Mostly 4, as many as have places; fewer where each worker took what the other refused.
        assert verdicts[Verdict.EQUAL] >= 1
        refused = [answer.reply.status for answer in answers if answer.verdict is Verdict.ERROR]
        assert set(refused) <= {429}
        await cluster.quiet()
        assert_equal(*await ask_all(client, oracle, cases(4, 60, 8, seed=55), at_once=2))


async def test_prefill_workers_take_no_more_than_they_can_park_and_go_on(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    """Computed prompts that decode workers do not take yet keep others waiting, which the load tells; all are
    served once they are taken."""
    for name in ("d1", "d2"):
        cluster.relays[name].set(forward=Faults(bytes_per_s=20_000))
    asking = asyncio.create_task(ask_all(client, oracle, cases(24, (250, 300), 4, seed=6), at_once=24))

    async def waits() -> bool:
        loads = (await load_of(cluster, "prefill")).values()
        return any(x["num_waiting"] and x["num_parked_blocks"] and not x["num_running"] for x in loads)

    await eventually(waits, 20.0)
    cluster.repair()
    assert_equal(*await asking)
