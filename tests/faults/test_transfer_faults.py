"""Cases XFR: what happens to transfers on their way, and what else comes in at their door."""

import asyncio
import pickle
import random
from pathlib import Path

import msgspec
import pytest

from common.messages import Accept, Blocks, Failed, Generate, Handover, Offer, Refuse, Refused, Sampling
from tests.faults import rogue, tiny_model
from tests.faults.client import Client, Verdict
from tests.faults.cluster import Cluster, running
from tests.faults.conftest import NUM_BLOCKS, SMALL
from tests.faults.looking import counters_of, total
from tests.faults.oracle import Oracle
from tests.faults.relay import Address, Faults
from tests.faults.support import ask_all, assert_equal, assert_never_wrong, case, cases, tally
from tests.faults.waiting import eventually

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * tiny_model.KV_BYTES_PER_TOKEN
DECODE = ("d1", "d2")


def set_all(cluster: Cluster, faults: Faults) -> None:
    for name in DECODE:
        cluster.relays[name].set(forward=faults)


def counted(cluster: Cluster, what: str) -> int:
    return sum(cluster.relays[name].counts[f"forward_{what}"] for name in DECODE)


async def test_transfers_share_connections(cluster: Cluster, client: Client, oracle: Oracle) -> None:
    """XFR-01: one from each prefill to each decode worker, however many prompts go over it."""
    before = sum(cluster.relays[name].counts["connections"] for name in DECODE)
    assert_equal(*await ask_all(client, oracle, cases(80, (20, 100), 2, seed=1)))
    assert sum(cluster.relays[name].counts["connections"] for name in DECODE) - before <= 4
    assert sum(cluster.relays[name].num_open for name in DECODE) <= 4


async def test_late_data_is_waited_for(cluster: Cluster, client: Client, oracle: Oracle) -> None:
    """XFR-02: nothing is announced before it has landed, so decode workers compute no prompt themselves."""
    before = await total(cluster, "prompt_tokens_total", "decode")
    set_all(cluster, Faults(delay_s=0.02, jitter_s=0.3))
    assert_equal(*await ask_all(client, oracle, cases(32, (20, 400), 6, seed=2)))
    assert await total(cluster, "prompt_tokens_total", "decode") == before


@pytest.mark.parametrize("name", ["d1", "p1", "proxy"])
async def test_no_request_is_lost_while_a_process_stands_still(
    cluster: Cluster, client: Client, oracle: Oracle, name: str
) -> None:
    """XFR-03: what waits for it is answered, or fails with an error."""
    asked = cases(60, (5, 40), 3, seed=3)
    oracle.references(asked)
    asking = asyncio.create_task(ask_all(client, oracle, asked, at_once=30))
    await asyncio.sleep(0.1)  # some are under way, others come while it stands still
    cluster.stop(name)
    await asyncio.sleep(3.5)  # longer than anybody is believed without a word
    cluster.cont(name)
    answers = await asking
    assert_never_wrong(*answers)
    assert tally(answers)[Verdict.EQUAL] == len(asked)


@pytest.mark.parametrize("transport", ["ipc"])
async def test_killed_workers_leave_no_files(
    model: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """XFR-05."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cluster = running(tmp_path / "logs", str(model), options=SMALL, transport=transport)
    async with cluster as started, Client(started.url) as client:
        for turn in range(2):
            assert_equal(*await ask_all(client, oracle, cases(6, (50, 300), 6, seed=50 + turn)))
            started.restart("d1")
            await started.ready()
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}


async def test_both_sides_compute_the_same_hashes(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """XFR-06: in processes whose hash seeds differ, a prompt sent once is found and not sent again."""
    asked = [case(256, 4, seed=600 + index) for index in range(4)]
    started = running(tmp_path, str(model), options=SMALL, forked=False)
    async with started as cluster, Client(cluster.url) as client:
        assert_equal(*await ask_all(client, oracle, asked))
        await cluster.quiet()
        before = await total(cluster, "transfer_sent_blocks_total", "prefill")
        assert_equal(*await ask_all(client, oracle, asked))
        await cluster.quiet()
        assert await total(cluster, "transfer_sent_blocks_total", "prefill") == before
        assert await total(cluster, "prompt_tokens_total", "decode") == 0


async def test_cancelled_transfers_harm_no_others(cluster: Cluster, client: Client, oracle: Oracle) -> None:
    """XFR-07."""
    source = random.Random(7)
    set_all(cluster, Faults(bytes_per_s=3e6))

    async def leave(index: int) -> None:
        asking = asyncio.create_task(client.complete(case(300, 4, seed=7000 + index), stream=True))
        await asyncio.wait([asking], timeout=source.uniform(0.0, 1.0))
        asking.cancel()
        await asyncio.wait([asking])

    leaving = asyncio.gather(*(leave(index) for index in range(40)))
    assert_equal(*await ask_all(client, oracle, cases(24, (100, 300), 6, seed=70)))
    await leaving


@pytest.mark.parametrize(
    ("fault", "faults"),
    [
        ("flips", Faults(flip_share=0.5, max_faults=4)),
        ("flips", Faults(flip_share=0.1, flip_from_bytes=40, max_faults=6)),  # of headers, too
        ("duplicates", Faults(duplicate_share=0.3, max_faults=3)),
        ("swaps", Faults(swap_share=0.3, max_faults=3)),
    ],
)
async def test_damaged_transfers_are_found_out_and_made_again(
    cluster: Cluster, client: Client, oracle: Oracle, fault: str, faults: Faults
) -> None:
    before = await fenced(cluster)
    set_all(cluster, faults)
    answers = await ask_all(client, oracle, cases(24, (300, 600), 6, seed=len(fault)))
    assert_never_wrong(*answers)
    assert tally(answers)[Verdict.EQUAL] > 12  # the others met a broken link in each of their attempts
    assert counted(cluster, fault) > 0
    if fault == "flips" and faults.flip_share == 0.5:
        assert await fenced(cluster) > before


async def fenced(cluster: Cluster) -> float:
    """Payloads that decode workers have turned away for their checksum."""
    return await total(cluster, "transfer_messages_fenced_total:checksum", "decode")


async def test_damaged_control_messages_never_change_a_reply(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    flips = Faults(flip_share=0.03, flip_from_bytes=40)
    names = [name for name in cluster.relays if name.endswith(".control")]
    for name in names:
        cluster.relays[name].set(flips, flips)
    client.timeout_s = 40.0
    answers = await ask_all(client, oracle, cases(100, (10, 100), 30, seed=91), at_once=8)
    assert_never_wrong(*answers)
    assert tally(answers)[Verdict.EQUAL] > 60
    counts = [cluster.relays[name].counts for name in names]
    assert sum(count["forward_flips"] for count in counts) > 0
    assert sum(count["backward_flips"] for count in counts) > 0


async def test_a_stalled_transfer_fails_in_time_and_is_made_elsewhere(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    cluster.relays["d1"].set(forward=Faults(blackhole="stall"))
    assert_equal(*await ask_all(client, oracle, cases(16, (100, 300), 6, seed=90)))


# What a peer says that is none of ours


async def test_a_peer_with_another_layout_is_refused_with_the_field_named(cluster: Cluster) -> None:
    for field, value in (("model_fingerprint", "other"), ("dtype", "float16"), ("protocol_version", 99)):
        async with rogue.connected(cluster, "d1", greeted=False, **{field: value}) as peer:
            answer = await peer.hear()
            assert isinstance(answer, Refused) and field in answer.reason


async def test_a_peer_that_means_somebody_else_is_refused(cluster: Cluster) -> None:
    async with rogue.connected(cluster, "d1", greeted=False, incarnation="somebody else") as peer:
        answer = await peer.hear()
        assert isinstance(answer, Refused) and "incarnation" in answer.reason


async def test_blocks_without_an_open_transfer_are_dropped_and_counted(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    key = "transfer_messages_fenced_total:no open transfer"
    before = (await counters_of(cluster, "d1")).get(key, 0.0)
    async with rogue.connected(cluster, "d1") as peer:
        for _ in range(5):
            await peer.say(Blocks("never offered", 0, 1), [bytes(BLOCK_BYTES)])
        assert isinstance(await peer.offer("afterwards", 20), Accept)

    async def told() -> bool:
        return (await counters_of(cluster, "d1")).get(key, 0.0) == before + 5

    await eventually(told, 10.0)


@pytest.mark.parametrize(
    ("first", "count", "num_bytes"),
    [(0, 2, BLOCK_BYTES), (3, 1, BLOCK_BYTES), (-1, 1, BLOCK_BYTES), (0, 0, 0), (0, 1, BLOCK_BYTES - 1)],
)
async def test_blocks_of_the_wrong_extent_end_their_transfer(
    cluster: Cluster, first: int, count: int, num_bytes: int
) -> None:
    async with rogue.connected(cluster, "d1") as peer:
        assert isinstance(await peer.offer("t", 2 * BLOCK_SIZE), Accept)
        await peer.say(Blocks("t", first, count), [bytes(num_bytes)] if num_bytes else [])
        answer = await peer.hear()
        assert isinstance(answer, Failed) and "extent" in answer.error.message


async def test_blocks_that_come_twice_end_their_transfer(cluster: Cluster) -> None:
    async with rogue.connected(cluster, "d1") as peer:
        assert isinstance(await peer.offer("t", 2 * BLOCK_SIZE), Accept)
        for _ in range(2):
            await peer.say(Blocks("t", 0, 1), [bytes(BLOCK_BYTES)])
        answers = [await peer.hear(), await peer.hear()]
        assert isinstance(answers[1], Failed) and "repeated" in answers[1].error.message


async def test_one_peer_cannot_write_into_the_transfer_of_another(cluster: Cluster) -> None:
    async with rogue.connected(cluster, "d1") as victim, rogue.connected(cluster, "d1") as thief:
        assert isinstance(await victim.offer("t", BLOCK_SIZE), Accept)
        await thief.say(Blocks("t", 0, 1), [b"\xff" * BLOCK_BYTES])
        assert isinstance(await thief.offer("u", BLOCK_SIZE), Accept)  # what came before it was dropped
        await victim.say(Blocks("t", 0, 1), [bytes(BLOCK_BYTES)])
        assert not isinstance(await victim.hear(), Failed)


HONEST = Generate("t", 0, tuple(range(16)), 16, "nobody", Sampling(max_tokens=4))


@pytest.mark.parametrize(
    "generate",
    [
        HONEST,
        msgspec.structs.replace(HONEST, request_id="another"),
        msgspec.structs.replace(HONEST, token_ids=tuple(range(17))),
        msgspec.structs.replace(HONEST, attempt=1),
    ],
)
async def test_a_hand_over_that_was_not_offered_or_not_sent_is_refused(
    cluster: Cluster, generate: Generate
) -> None:
    """Without its blocks; of another request; with other tokens; of another attempt."""
    async with rogue.connected(cluster, "d1") as peer:
        assert isinstance(await peer.offer("t", 16), Accept)
        await peer.say(Handover("t", generate, (1,)))
        assert isinstance(await peer.hear(), Failed)


async def test_offers_that_can_never_fit_are_refused(cluster: Cluster) -> None:
    async with rogue.connected(cluster, "d1") as peer:
        for num_tokens in (0, NUM_BLOCKS * BLOCK_SIZE + 1):
            assert isinstance(await peer.offer(f"t{num_tokens}", num_tokens), Refuse)


async def test_offers_that_never_go_on_take_bounded_room_and_leave_with_their_peer(
    cluster: Cluster, client: Client, oracle: Oracle
) -> None:
    async with rogue.connected(cluster, "d1") as peer:
        refused = 0
        for index in range(3000):
            await peer.say(rogue_offer(index))
        while not refused:
            refused += isinstance(await peer.hear(), Refuse)
        assert_equal(*await ask_all(client, oracle, cases(4, 100, 4, seed=95), at_once=1))
    await cluster.quiet()


def rogue_offer(index: int) -> Offer:
    return Offer(f"orphan {index}", f"orphan {index}", 0, 15, (), 60.0)


@pytest.mark.parametrize(
    "data",
    [
        random.Random(0).randbytes(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 8 + b"\x7f" + bytes(64),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",  # the beginning of a ZMTP greeting
        pickle.dumps(print),
    ],
)
async def test_strangers_at_the_internal_ports_do_no_harm(
    cluster: Cluster, client: Client, oracle: Oracle, data: bytes
) -> None:
    before = cluster.usage()
    ports = [cluster.control_port]
    ports += [
        Address.parse((await cluster.workers())[name]["address"].partition("://")[2]).port for name in DECODE
    ]
    for port in ports:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.close()
    assert_equal(*await ask_all(client, oracle, cases(6, 60, 4, seed=99)))
    for name, usage in cluster.usage().items():
        assert usage.rss_bytes < before[name].rss_bytes + (64 << 20), name
        assert usage.pid == before[name].pid


@pytest.mark.parametrize(
    "header", [b"", b"\x80", b"\xff" * 100, pickle.dumps(print), b"\x81\xa4type\xa5Bogus"]
)
async def test_a_peer_that_says_nonsense_is_cut_off_alone(
    cluster: Cluster, client: Client, oracle: Oracle, header: bytes
) -> None:
    asking = asyncio.create_task(ask_all(client, oracle, cases(8, 100, 8, seed=98)))
    async with rogue.connected(cluster, "d1") as peer:
        await peer.say_bytes(header)
        with pytest.raises(ConnectionError):
            await peer.hear()
    assert_equal(*await asking)
