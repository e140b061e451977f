"""A prefill and a decode worker in one process, spoken to as a proxy would: real channels, real transfers, a
toy model."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import msgspec
import pytest

from common.channel import Peer, WorkerChannel
from common.config import StopConfig, TransferConfig, WorkerConfig
from common.engine import Engine
from common.loop_thread import LoopThread
from common.messages import (
    Abort,
    Accept,
    Blocks,
    BlocksRemoved,
    Credit,
    DecodeTarget,
    Drain,
    Generate,
    Handover,
    Hello,
    Landed,
    Offer,
    Outputs,
    Ping,
    Refusal,
    Sampling,
    Status,
    Tokens,
    Welcome,
    decode_transfer,
    encode,
)
from common.service import Service
from decode_worker.worker import DecodeWorker
from kv_transfer.transport import Connection, Listener, connect, listen
from prefill_worker.worker import PrefillWorker
from tests.common import toy
from tests.common.toy import make_engine, prompt

TIMEOUT_S = 60.0
names = count()
transfer_config = TransferConfig(stall_timeout_s=10.0)


class ScriptedProxy:
    """Welcomes workers, keeps them awake with pings, and notes what they say."""

    def __init__(self) -> None:
        self.channel = WorkerChannel("tcp://127.0.0.1:*")
        self.status: dict[str, Status] = {}
        self.peers: dict[str, Peer] = {}
        self.tokens: dict[str, list[Tokens]] = defaultdict(list)
        self.sources: dict[str, list[str]] = defaultdict(list)  # role of the worker behind each message
        self.blocks: dict[str, set[bytes]] = defaultdict(set)  # in the caches, as their workers tell it
        self._changed = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._ping())]

    async def _listen(self) -> None:
        roles: dict[Peer, str] = {}
        while True:
            peer, message = await self.channel.receive()
            async with self._changed:
                if isinstance(message, Status):
                    if peer not in roles:
                        self.channel.send(peer, Welcome("proxy"))
                    roles[peer] = message.role
                    self.status[message.role], self.peers[message.role] = message, peer
                elif isinstance(message, Outputs):
                    for tokens in message.tokens:
                        self.tokens[tokens.request_id].append(tokens)
                        self.sources[tokens.request_id].append(roles[peer])
                else:
                    known = self.blocks[roles[peer]]
                    if isinstance(message, BlocksRemoved):
                        known.difference_update(message.block_hashes)
                    else:
                        if message.is_first:
                            known.clear()
                        known.update(message.block_hashes)
                self._changed.notify_all()

    async def _ping(self) -> None:
        while True:
            for peer in self.peers.values():
                with suppress(ConnectionError):
                    self.channel.send(peer, Ping("proxy"))
            await asyncio.sleep(0.2)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(condition)

    def send(self, role: str, message: Any) -> None:
        self.channel.send(self.peers[role], message)

    def generate(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, handoff: bool = True, **changes: Any
    ) -> None:
        decode = self.status["decode"]
        message = Generate(
            request_id=request_id,
            attempt=0,
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            proxy="proxy",
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            decode=DecodeTarget(decode.address, decode.incarnation) if handoff else None,
        )
        self.send("prefill" if handoff else "decode", msgspec.structs.replace(message, **changes))

    def last(self, request_id: str) -> Tokens | None:
        """The terminal message."""
        return next((t for t in self.tokens[request_id] if t.finish_reason is not None), None)

    async def finished(self, request_id: str) -> Tokens:
        await self.until(lambda: self.last(request_id) is not None)
        last = self.last(request_id)
        assert last is not None
        return last

    def output(self, request_id: str) -> list[int]:
        """Tokens by position; two workers may tell the same one, and must agree."""
        output: dict[int, int] = {}
        for tokens in self.tokens[request_id]:
            for position, token_id in enumerate(tokens.token_ids, tokens.start):
                assert output.setdefault(position, token_id) == token_id
        return [output[position] for position in range(len(output))]

    def free_blocks(self, role: str) -> int:
        return self.status[role].load.num_free_blocks

    async def blocks_are_back(self) -> None:
        """By status messages from after this call: those that hear it have done all that was asked before."""
        for role in self.peers:
            old = self.status[role]
            await self.until(lambda role=role, old=old: self.status[role] is not old)  # type: ignore[misc]
            old = self.status[role]
            await self.until(lambda role=role, old=old: self.status[role] is not old)  # type: ignore[misc]
        await self.until(
            lambda: all(s.load.num_free_blocks == s.load.num_blocks for s in self.status.values())
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.channel.close()


class Cluster:
    def __init__(
        self, proxy: ScriptedProxy, prefill: Engine, decode: Engine, drain_timeout_s: float = 20.0
    ) -> None:
        self.proxy, self.prefill_engine, self.decode_engine = proxy, prefill, decode
        self.transfers = [LoopThread("p"), LoopThread("d")]
        config = WorkerConfig(proxies=(proxy.channel.address,), heartbeat_interval_s=0.05)
        stop = StopConfig(drain_timeout_s)
        self.prefill = PrefillWorker(prefill, self.transfers[0], transfer_config, "p1", "prefill")
        self.decode = DecodeWorker(decode, self.transfers[1], transfer_config, "d1", "decode")
        self.services = {
            "prefill": Service(config, stop, "p1", self.prefill, prefill),
            "decode": Service(config, stop, "d1", self.decode, decode),
        }
        self.prefill.service, self.decode.service = self.services["prefill"], self.services["decode"]
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.listener: Listener | None = None

    async def start(self) -> None:
        address = f"inproc://workers-{next(names)}"
        self.listener = await self.transfers[1].run(listen(address, self.decode.receiver.serve))
        self.decode.address = self.listener.address
        self.prefill_engine.start(self.prefill.on_step)
        self.decode_engine.start(self.decode.on_step)
        self.tasks = {role: asyncio.create_task(service.run()) for role, service in self.services.items()}
        await self.proxy.until(lambda: len(self.proxy.status) == 2)

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.prefill_engine.stop()
        self.decode_engine.stop()
        await self.transfers[0].run(self.prefill.close())
        if self.listener is not None:
            await self.transfers[1].run(self.listener.close())
        for transfers in self.transfers:
            transfers.close()


@asynccontextmanager
async def cluster(
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    drain_timeout_s: float = 20.0,
) -> AsyncIterator[Cluster]:
    proxy = ScriptedProxy()
    engines = make_engine(**(prefill or {})), make_engine(**(decode or {}))
    running = Cluster(proxy, *engines, drain_timeout_s)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
        await proxy.close()


def reference(token_ids: list[int], max_tokens: int) -> list[int]:
    """What one engine alone makes of it."""
    return toy.generate(token_ids, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 40])
async def test_a_pair_gives_the_tokens_of_a_single_engine(length: int) -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(length), 12)
        last = await proxy.finished("a")
        assert last.finish_reason == "length"
        assert proxy.output("a") == reference(prompt(length), 12)
        assert set(proxy.sources["a"]) == {"prefill", "decode"}
        await proxy.blocks_are_back()


async def test_many_requests_at_once_all_get_their_own_tokens() -> None:
    async with cluster(prefill={"num_blocks": 40}, decode={"num_blocks": 40}) as running:
        proxy = running.proxy
        prompts = {f"r{i}": prompt(3 + 4 * i, i) for i in range(12)}
        for name, token_ids in prompts.items():
            proxy.generate(name, token_ids, 8)
        for name, token_ids in prompts.items():
            await proxy.finished(name)
            assert proxy.output(name) == reference(token_ids, 8)
        await proxy.blocks_are_back()


async def test_a_request_that_ends_with_its_first_token_is_not_transferred() -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(9), 1)
        assert (await proxy.finished("a")).finish_reason == "length"
        assert set(proxy.sources["a"]) == {"prefill"}
        await proxy.blocks_are_back()
        assert running.decode.receiver.counters.num_landed == 0


async def test_a_decode_worker_serves_a_whole_request_by_itself() -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(9), 6, handoff=False)
        await proxy.finished("a")
        assert proxy.output("a") == reference(prompt(9), 6)
        assert set(proxy.sources["a"]) == {"decode"}


async def test_a_retry_continues_where_the_first_attempt_ended() -> None:
    async with cluster() as running:
        proxy = running.proxy
        whole = reference(prompt(9), 10)
        proxy.generate("a", prompt(9) + whole[:4], 10, attempt=1, num_prompt_tokens=9)
        await proxy.finished("a")
        starts = [t.start for t in proxy.tokens["a"] if t.token_ids]
        assert min(starts) == 4
        tokens = {t.start + i: token for t in proxy.tokens["a"] for i, token in enumerate(t.token_ids)}
        assert [tokens[i] for i in range(4, 10)] == whole[4:]


async def test_timings_split_the_way_of_a_request() -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(30), 12)
        await proxy.finished("a")
        timings: dict[str, float] = {}
        for tokens in proxy.tokens["a"]:
            timings |= tokens.timings
        assert timings.keys() >= {"queue_s", "prefill_s", "decode_wait_s", "first_step_s", "decode_s"}
        assert all(seconds >= 0 for seconds in timings.values())


async def test_a_prompt_too_long_for_the_decode_pool_ends_in_one_error() -> None:
    async with cluster(decode={"num_blocks": 4}) as running:
        proxy = running.proxy
        proxy.generate("a", prompt(30), 4)
        last = await proxy.finished("a")
        assert last.error is not None and last.error.code == "invalid"
        await proxy.blocks_are_back()


async def test_a_repeated_generate_is_served_once() -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(9), 6)
        proxy.generate("a", prompt(9), 6)
        await proxy.finished("a")
        proxy.generate("b", prompt(5), 6)
        await proxy.finished("b")
        assert sum(t.finish_reason is not None for t in proxy.tokens["a"]) == 1


async def test_an_unreachable_decode_worker_is_reported_as_a_lost_peer() -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(9), 6, decode=DecodeTarget("inproc://nowhere", "d7"))
        last = await proxy.finished("a")
        assert last.error is not None and last.error.code == "peer_lost"
        await proxy.blocks_are_back()


async def test_an_unknown_proxy_in_a_handover_leaves_nothing_running() -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(9), 400, proxy="someone else")
        await proxy.until(lambda: running.decode.receiver.counters.num_landed == 1)
        await proxy.blocks_are_back()
        assert "decode" not in proxy.sources["a"]


async def test_a_handover_that_the_engine_refuses_ends_in_one_error_that_may_be_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise Refusal("invalid", "the tokens handed over are not those of the reserved blocks")

    async with cluster() as running:
        monkeypatch.setattr(running.decode_engine, "adopt", refuse)
        running.proxy.generate("a", prompt(30), 20)
        last = await running.proxy.finished("a")
        assert last.error is not None and last.error.retryable
        told_by = running.proxy.sources["a"][running.proxy.tokens["a"].index(last)]
        assert told_by == "decode"  # other messages may follow, such as what the transfer cost
        await running.proxy.blocks_are_back()
        await running.proxy.until(lambda: all(s.num_requests == 0 for s in running.services.values()))
        assert sum(tokens.finish_reason is not None for tokens in running.proxy.tokens["a"]) == 1


@pytest.mark.parametrize("num_tokens_seen", [0, 1, 2, 5])
async def test_an_abort_frees_both_workers_wherever_the_request_is(num_tokens_seen: int) -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(30), 200)
        await proxy.until(lambda: len(proxy.output("a")) >= num_tokens_seen)
        for role in ("prefill", "decode"):
            proxy.send(role, Abort("a", 0))
        await proxy.blocks_are_back()
        await proxy.until(lambda: all(s.num_requests == 0 for s in running.services.values()))


async def test_aborts_at_random_moments_leave_nothing_behind() -> None:
    async with cluster() as running:
        proxy = running.proxy
        for index in range(40):
            proxy.generate(f"r{index}", prompt(5 + index, index), 60)
            await proxy.until(lambda index=index: len(proxy.output(f"r{index}")) >= index % 4)  # type: ignore[misc]
            for role in ("prefill", "decode"):
                proxy.send(role, Abort(f"r{index}", 0))
        proxy.generate("last", prompt(20), 5)
        await proxy.finished("last")
        assert proxy.output("last") == reference(prompt(20), 5)
        await proxy.blocks_are_back()


async def test_a_lost_proxy_takes_its_requests_with_it() -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(9), 100)
        await proxy.until(lambda: len(proxy.output("a")) >= 2)
        await proxy.close()
        async with asyncio.timeout(TIMEOUT_S):
            while not is_at_rest(running):
                await asyncio.sleep(0.02)


def is_at_rest(running: Cluster) -> bool:
    load = running.decode_engine.load()
    return (
        not any(service.num_requests for service in running.services.values())
        and load.num_running == 0
        and load.num_free_blocks == load.num_blocks
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_drained_worker_finishes_what_it_has_and_refuses_the_rest(role: str) -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(9), 30)
        await proxy.until(lambda: len(proxy.output("a")) >= (0 if role == "prefill" else 2))
        proxy.send(role, Drain())
        await proxy.until(lambda: proxy.status[role].draining)
        await proxy.finished("a")
        assert proxy.output("a") == reference(prompt(9), 30)
        async with asyncio.timeout(TIMEOUT_S):
            await running.tasks[role]


async def peer_of(running: Cluster) -> Connection:
    """A prefill worker played by hand, in the decode worker's transfer loop."""
    connection = await connect(running.decode.address, timeout_s=TIMEOUT_S)
    await connection.send(encode(Hello("p9", "d1", running.decode_engine.layout)))
    assert isinstance(await answer(connection), Welcome)
    return connection


async def answer(connection: Connection) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return decode_transfer((await connection.receive())[0])


async def test_a_hand_over_that_stands_still_does_not_outlive_the_time_to_drain() -> None:
    async with cluster(drain_timeout_s=0.3) as running:

        async def open_a_transfer() -> Connection:
            connection = await peer_of(running)
            await connection.send(encode(Offer("t", "a", 0, 3, (), 600.0)))
            assert isinstance(await answer(connection), Accept)
            return connection

        connection = await running.transfers[1].run(open_a_transfer())
        assert not running.decode.idle()
        running.services["decode"].drain()
        async with asyncio.timeout(TIMEOUT_S):
            await running.tasks["decode"]
        await running.transfers[1].run(connection.close())


async def test_room_kept_for_a_hand_over_that_is_refused_goes_to_the_next_in_the_queue() -> None:
    async with cluster(decode={"num_blocks": 2}) as running:
        num_tokens = running.decode_engine.layout.block_size
        payload = bytes(running.decode_engine.cache.block_bytes)
        wrong = Generate("a", 0, tuple(prompt(num_tokens)), num_tokens, "proxy", Sampling(max_tokens=4))

        async def hand_over() -> Connection:
            connection = await peer_of(running)
            for name in ("a", "b"):
                await connection.send(encode(Offer(name, name, 0, num_tokens, (b"another prompt's",), 60.0)))
            assert (await answer(connection)).transfer_id == "a"
            await connection.send(encode(Blocks("a", 0, 1)), [payload])
            await connection.send(encode(Handover("a", wrong, (1,), (), 0, {})))
            answers = [await answer(connection) for _ in range(3)]
            assert [type(message) for message in answers] == [Credit, Landed, Accept]
            assert answers[2].transfer_id == "b"
            return connection

        connection = await running.transfers[1].run(hand_over())
        await running.transfers[1].run(connection.close())


async def test_proxies_hear_exactly_which_blocks_the_caches_hold() -> None:
    async with cluster(prefill={"num_blocks": 24}, decode={"num_blocks": 24}) as running:
        proxy = running.proxy
        for index in range(6):  # more than the caches hold, so that blocks go, too
            proxy.generate(f"r{index}", prompt(30, index), 4)
            await proxy.finished(f"r{index}")
        for role, engine in (("prefill", running.prefill_engine), ("decode", running.decode_engine)):
            pool = engine._pool
            await proxy.until(lambda role=role, pool=pool: proxy.blocks[role] == set(pool.hashes()))  # type: ignore[misc]
            assert proxy.blocks[role]


async def test_workers_report_how_fast_they_and_their_links_are() -> None:
    async with cluster() as running:
        proxy = running.proxy
        proxy.generate("a", prompt(40), 6)
        await proxy.finished("a")
        await proxy.until(lambda: proxy.status["prefill"].links.get("d1", 0) > 0)
        await proxy.until(lambda: proxy.status["prefill"].pace.prefill_tokens_per_s > 0)
        await proxy.until(lambda: proxy.status["decode"].pace.step_s > 0)
        assert proxy.status["decode"].block_bytes == running.decode_engine.cache.block_bytes
