import asyncio
import errno
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from common import channel as channel_module
from common.channel import Peer, ProxyChannel, SessionBroken, WorkerChannel
from common.messages import Abort, BlocksStored, Outputs, Ping, Refused, Tokens, ToWorker, Welcome, encode
from common.seal import seal
from common.secret import Secret

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0
HELLO = BlocksStored(())  # stands for any message of a worker


@contextmanager
def listening(address: str = "tcp://127.0.0.1:0") -> Iterator[WorkerChannel]:
    workers = WorkerChannel(address)
    try:
        yield workers
    finally:
        workers.close()


@contextmanager
def connected(address: str, name: str = "worker-1", silent_after_s: float = WAIT_S) -> Iterator[ProxyChannel]:
    proxy = ProxyChannel(address, name, silent_after_s)
    try:
        yield proxy
    finally:
        proxy.close()


@asynccontextmanager
async def reading(proxy: ProxyChannel) -> AsyncIterator["asyncio.Queue[ToWorker | ConnectionError]"]:
    """What a worker's receiving task sees."""
    seen: asyncio.Queue[ToWorker | ConnectionError] = asyncio.Queue()

    async def read() -> None:
        while True:
            try:
                seen.put_nowait(await proxy.receive())
            except ConnectionError as error:
                seen.put_nowait(error)

    task = asyncio.create_task(read())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


async def announced(workers: WorkerChannel, proxy: ProxyChannel) -> Peer:
    """The worker says something until it is heard, as its heartbeat does."""
    hearing = asyncio.create_task(workers.receive())
    for _ in range(2000):
        with suppress(ConnectionError):
            proxy.send(HELLO)
        done, _ = await asyncio.wait([hearing], timeout=0.01)
        if done:
            return hearing.result()[0]
    raise AssertionError("the worker was never heard")


def flood(send: Callable[[], None]) -> None:
    for _ in range(1000):
        send()


async def expect_loss(seen: "asyncio.Queue[ToWorker | ConnectionError]") -> str:
    event = await asyncio.wait_for(seen.get(), WAIT_S)
    assert isinstance(event, ConnectionError), event
    return str(event)


async def test_messages_pass_both_ways_in_order() -> None:
    with listening() as workers, connected(workers.address) as proxy:
        async with reading(proxy) as seen:
            peer = await announced(workers, proxy)
            workers.send(peer, Welcome("proxy-1"))
            aborts = [Abort(f"request-{i}", 0) for i in range(100)]
            for abort in aborts:
                workers.send(peer, abort)
            assert [await asyncio.wait_for(seen.get(), WAIT_S) for _ in aborts] == aborts
            assert proxy.proxy_incarnation == "proxy-1"
            outputs = [Outputs((Tokens("r", 0, i, (i,)),)) for i in range(100)]
            for output in outputs:
                proxy.send(output)
            received: list[Outputs] = []
            while len(received) < len(outputs):
                sender, message = await asyncio.wait_for(workers.receive(), WAIT_S)
                assert sender == peer
                if isinstance(message, Outputs):
                    received.append(message)
            assert received == outputs


async def test_nothing_but_a_refusal_is_delivered_before_the_welcome() -> None:
    with listening() as workers, connected(workers.address) as proxy:
        async with reading(proxy) as seen:
            peer = await announced(workers, proxy)
            workers.send(peer, Abort("void", 0))
            workers.send(peer, Refused("dtype differs"))
            assert await asyncio.wait_for(seen.get(), WAIT_S) == Refused("dtype differs")


async def test_a_second_welcome_voids_what_was_before() -> None:
    with listening() as workers, connected(workers.address) as proxy:
        async with reading(proxy) as seen:
            peer = await announced(workers, proxy)
            workers.send(peer, Welcome("proxy-1"))
            workers.send(peer, Abort("before", 0))
            workers.send(peer, Welcome("proxy-1"))
            workers.send(peer, Abort("after", 0))
            assert await asyncio.wait_for(seen.get(), WAIT_S) == Abort("before", 0)
            assert "given this worker up" in await expect_loss(seen)
            assert await asyncio.wait_for(seen.get(), WAIT_S) == Abort("after", 0)


async def test_a_worker_survives_the_restart_of_its_proxy() -> None:
    with listening() as workers:
        address = workers.address
        with connected(address) as proxy:
            async with reading(proxy) as seen:
                first = await announced(workers, proxy)
                workers.send(first, Welcome("proxy-1"))
                workers.send(first, Abort("old", 0))
                assert await asyncio.wait_for(seen.get(), WAIT_S) == Abort("old", 0)
                workers.close()
                assert "connection lost" in await expect_loss(seen)
                assert proxy.proxy_incarnation is None
                with listening(address) as restarted:
                    second = await announced(restarted, proxy)
                    assert second != first
                    restarted.send(second, Welcome("proxy-2"))
                    restarted.send(second, Abort("new", 0))
                    assert await asyncio.wait_for(seen.get(), WAIT_S) == Abort("new", 0)
                    assert proxy.proxy_incarnation == "proxy-2"


async def test_a_silent_proxy_is_noticed_and_one_that_pings_is_not() -> None:
    with listening() as workers, connected(workers.address, silent_after_s=1.0) as proxy:
        async with reading(proxy) as seen:
            peer = await announced(workers, proxy)
            workers.send(peer, Welcome("proxy-1"))
            for _ in range(15):
                workers.send(peer, Ping("proxy-1"))
                done = await asyncio.wait([asyncio.create_task(seen.get())], timeout=0.1)
                assert not done[0]
                for pending in done[1]:
                    pending.cancel()
            assert "silent" in await expect_loss(seen)


async def test_sending_to_a_worker_that_left_fails_at_once_and_its_end_is_announced() -> None:
    with listening() as workers:
        with connected(workers.address) as proxy:
            async with reading(proxy):
                peer = await announced(workers, proxy)
        await asyncio.wait_for(workers.disconnected(), WAIT_S)
        with pytest.raises(ConnectionError, match="gone"):
            workers.send(peer, Ping("proxy-1"))
        with pytest.raises(ConnectionError, match="gone"):
            workers.send(b"nobody", Ping("proxy-1"))


async def test_a_worker_that_is_gone_is_not_heard_again() -> None:
    with listening() as workers, connected(workers.address, "2") as other:
        async with reading(other):
            with connected(workers.address) as proxy:
                async with reading(proxy):
                    peer = await announced(workers, proxy)
                    for _ in range(100):
                        proxy.send(HELLO)
            await asyncio.wait_for(workers.disconnected(), WAIT_S)
            with pytest.raises(ConnectionError, match="gone"):
                workers.send(peer, Ping("proxy-1"))
            assert await announced(workers, other) != peer


def test_only_so_much_is_remembered() -> None:
    recent = channel_module.Recent()
    for number in range(5000):
        recent.add(number)
    assert 4999 in recent
    assert 0 not in recent


async def test_a_worker_that_does_not_read_fills_its_own_queue_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_QUEUED_MESSAGES", 10)
    with (
        listening() as workers,
        connected(workers.address) as stuck,
        connected(workers.address, "2") as healthy,
    ):
        async with reading(healthy) as seen:
            stuck_peer, healthy_peer = await announced(workers, stuck), b""
            while healthy_peer in (b"", stuck_peer):
                healthy_peer = await announced(workers, healthy)
            big = Abort("x" * 1_000_000, 0)
            with pytest.raises(ConnectionError, match="does not read"):
                flood(lambda: workers.send(stuck_peer, big))
            workers.send(healthy_peer, Welcome("proxy-1"))
            workers.send(healthy_peer, Abort("r", 0))
            assert await asyncio.wait_for(seen.get(), WAIT_S) == Abort("r", 0)


async def test_a_proxy_that_does_not_read_costs_the_session_and_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "MAX_QUEUED_MESSAGES", 10)
    with listening() as workers, connected(workers.address) as proxy:
        async with reading(proxy) as seen:
            peer = await announced(workers, proxy)
            workers.send(peer, Welcome("proxy-1"))
            workers.send(peer, Abort("r", 0))
            assert await asyncio.wait_for(seen.get(), WAIT_S) == Abort("r", 0)
            big = BlocksStored((b"x" * 1_000_000,))
            with pytest.raises(ConnectionError, match="unread"):
                flood(lambda: proxy.send(big))
            workers.send(peer, Ping("proxy-1"))
            assert "unread" in await expect_loss(seen)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x80\x04pickle", b"12345678"],
        [b"a", b"b", b"c"],
        [b"\xc1" * 100, seal(b"\xc1" * 100)],
        [b"\x81\xa4type\xa4Boom", seal(b"\x81\xa4type\xa4Boom")],
        [encode(HELLO)],
        [encode(HELLO), seal(b"something else")],
    ],
)
async def test_what_is_no_message_breaks_the_session_of_its_sender_alone(frames: list[bytes]) -> None:
    context = zmq.asyncio.Context()
    with listening() as workers, connected(workers.address) as proxy:
        async with reading(proxy):
            peer = await announced(workers, proxy)
            stranger = context.socket(zmq.DEALER)
            stranger.connect(workers.address)
            await stranger.send_multipart(frames)
            assert (await first_broken(workers)).peer != peer
            assert workers.num_malformed == 1
            proxy.send(HELLO)
            assert await asyncio.wait_for(workers.receive(), WAIT_S) == (peer, HELLO)
    context.destroy(linger=0)


async def first_broken(workers: WorkerChannel) -> SessionBroken:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await workers.receive()
            except SessionBroken as broken:
                return broken


async def test_a_damaged_message_ends_the_session_of_a_worker() -> None:
    with listening() as workers, connected(workers.address) as proxy:
        async with reading(proxy) as seen:
            peer = await announced(workers, proxy)
            workers.send(peer, Welcome("proxy-1"))
            workers.send(peer, Abort("r", 0))
            assert await asyncio.wait_for(seen.get(), WAIT_S) == Abort("r", 0)
            workers._socket.send_multipart([peer, encode(Abort("s", 0)), seal(encode(Abort("t", 0)))])
            assert "damaged" in await expect_loss(seen)
            assert await announced(workers, proxy) != peer


async def test_a_port_that_closes_connections_is_retried_with_pauses() -> None:
    times: list[float] = []
    enough = asyncio.Event()

    async def slam(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 4:
            enough.set()
        writer.close()

    server = await asyncio.start_server(slam, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with connected(f"tcp://127.0.0.1:{port}") as proxy:
        async with reading(proxy):
            await asyncio.wait_for(enough.wait(), WAIT_S)
    server.close()
    await server.wait_closed()
    assert times[3] - times[0] > 3 * channel_module.RECONNECT_S[0]


async def test_a_taken_port_is_an_error_that_names_the_address() -> None:
    with listening() as workers:
        with pytest.raises(OSError, match=workers.address) as raised:
            WorkerChannel(workers.address)
        assert raised.value.errno == errno.EADDRINUSE


async def test_what_a_worker_said_last_arrives_though_it_closes_at_once() -> None:
    with listening() as workers, connected(workers.address) as proxy:
        await announced(workers, proxy)
        for number in range(500):
            proxy.send(Outputs((Tokens(f"r{number}", 0, 0, finish_reason="stop"),)))
        proxy.close(flush_s=WAIT_S)
        last = ""
        while last != "r499":
            _, message = await asyncio.wait_for(workers.receive(), WAIT_S)
            last = message.tokens[0].request_id if isinstance(message, Outputs) else last


def test_a_proxy_that_stands_still_under_load_lives_on() -> None:
    command = [sys.executable, "-m", "tests.common.flooded"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


async def test_sides_with_one_secret_understand_each_other() -> None:
    secret = Secret.new()
    workers = WorkerChannel("tcp://127.0.0.1:0", secret)
    proxy = ProxyChannel(workers.address, "worker-1", WAIT_S, secret)
    try:
        await announced(workers, proxy)
    finally:
        proxy.close()
        workers.close()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Secret.new(), Secret.new()), (Secret.new(), None), (None, Secret.new())]
)
async def test_who_lacks_the_secret_is_not_heard_and_both_sides_say_so_once(
    ours: Secret | None, theirs: Secret | None, caplog: pytest.LogCaptureFixture
) -> None:
    workers = WorkerChannel("tcp://127.0.0.1:0", ours)
    proxy = ProxyChannel(workers.address, "worker-1", WAIT_S, theirs)
    watch = asyncio.create_task(workers.disconnected())
    listen = asyncio.create_task(workers.receive())
    talk = asyncio.create_task(proxy.receive())
    try:
        async with asyncio.timeout(WAIT_S):
            while workers.num_strangers < 3:
                with suppress(ConnectionError):
                    proxy.send(HELLO)
                await asyncio.wait([watch], timeout=0.05)
                if watch.done():
                    watch = asyncio.create_task(workers.disconnected())
    finally:
        for task in (watch, listen, talk):
            task.cancel()
        await asyncio.wait([watch, listen, talk])
        proxy.close()
        workers.close()
    assert listen.cancelled()
    assert sum("without our secret was refused" in record.getMessage() for record in caplog.records) == 1
    assert sum("do not have the same secret" in record.getMessage() for record in caplog.records) == 1
