import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from tests.faults.relay import Address, Faults, Relay
from tests.faults.waiting import eventually

WAIT_S = 20.0


@asynccontextmanager
async def echoing() -> AsyncIterator[Relay]:
    """A relay in front of a server that sends everything back."""
    conversations: set[asyncio.Task[None]] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        conversations.add(task)
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay(Address(*server.sockets[0].getsockname()[:2]))
    try:
        yield relay
    finally:
        relay.close()
        server.close()
        if conversations:
            await asyncio.wait(conversations, timeout=WAIT_S)


@asynccontextmanager
async def connected(relay: Relay) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(*relay.address)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


def pattern(num_bytes: int) -> bytes:
    return bytes(range(251)) * (num_bytes // 251 + 1)


async def exchange(relay: Relay, data: bytes) -> bytes:
    """Everything that comes back until the end of the stream."""
    async with connected(relay) as (reader, writer):
        writer.write(data)
        writer.write_eof()
        return await reader.read()


async def test_passes_everything_on_unharmed_and_counts_it() -> None:
    data = pattern(1 << 20)
    async with echoing() as relay:
        assert await exchange(relay, data) == data
        assert relay.counts["forward_bytes"] == relay.counts["backward_bytes"] == len(data)
        assert relay.counts["connections"] == 1


async def test_a_cut_lets_exactly_so_many_bytes_through() -> None:
    async with echoing() as relay:
        relay.set(forward=Faults(cut_after_bytes=100_000, cut="close"))
        async with connected(relay) as (reader, writer):
            writer.write(pattern(100_000)[:100_000])
            assert pattern(100_000).startswith(await reader.read())
        assert relay.counts["forward_bytes"] == 100_000


async def test_a_reset_is_seen_as_one() -> None:
    async with echoing() as relay:
        relay.set(forward=Faults(cut_after_bytes=10))
        async with connected(relay) as (reader, writer):
            writer.write(pattern(100))
            with pytest.raises(ConnectionResetError):
                await reader.read()


async def test_open_connections_are_cut_on_command() -> None:
    async with echoing() as relay, connected(relay) as (reader, writer):
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        relay.cut("reset")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await eventually(lambda: relay.num_open == 0, WAIT_S)


async def test_a_clean_close_ends_the_stream_without_an_error() -> None:
    async with echoing() as relay, connected(relay) as (reader, writer):
        writer.write(b"ping")
        await reader.readexactly(4)
        relay.cut("close")
        assert await reader.read() == b""


async def test_flips_the_bytes_at_the_offsets_given_and_no_others() -> None:
    async with echoing() as relay:
        relay.set(forward=Faults(flip_at=(5, 150_000)))
        sent, back = pattern(200_000), await exchange(relay, pattern(200_000))
        assert [i for i, (a, b) in enumerate(zip(sent, back, strict=True)) if a != b] == [5, 150_000]


async def test_offsets_count_from_when_the_faults_were_set() -> None:
    async with echoing() as relay, connected(relay) as (reader, writer):
        writer.write(b"abcd")
        assert await reader.readexactly(4) == b"abcd"
        relay.set(forward=Faults(flip_at=(1,)))
        writer.write(b"abcd")
        assert await reader.readexactly(4) == b"a\x22cd"


async def test_faults_by_chance_stop_after_their_number() -> None:
    data = pattern(2 << 20)
    async with echoing() as relay:
        relay.set(forward=Faults(flip_share=1.0, max_faults=3))
        back = await exchange(relay, data)
        assert sum(a != b for a, b in zip(data, back, strict=True)) == 3


async def test_duplicates_make_the_stream_longer() -> None:
    async with echoing() as relay:
        relay.set(forward=Faults(duplicate_share=1.0, max_faults=1))
        assert await exchange(relay, b"abc") == b"abcabc"


async def test_swapped_chunks_change_places() -> None:
    async with echoing() as relay, connected(relay) as (reader, writer):
        relay.set(forward=Faults(swap_share=1.0, max_faults=1))
        writer.write(b"first")
        await eventually(lambda: relay.counts["forward_swaps"] == 1, WAIT_S)
        writer.write(b"second")
        assert await reader.readexactly(11) == b"secondfirst"


async def test_delay_and_rate_hold_bytes_back_and_lose_none() -> None:
    data = pattern(100_000)
    async with echoing() as relay:
        relay.set(forward=Faults(delay_s=0.2, jitter_s=0.1, bytes_per_s=500_000))
        started = asyncio.get_running_loop().time()
        assert await exchange(relay, data) == data
        assert asyncio.get_running_loop().time() - started > 0.2


async def test_a_stalled_connection_goes_on_where_it_stopped() -> None:
    async with echoing() as relay, connected(relay) as (reader, writer):
        relay.set(backward=Faults(blackhole="stall"))
        writer.write(b"late")
        await eventually(lambda: relay.counts["forward_bytes"] == 4, WAIT_S)
        assert relay.counts["backward_bytes"] == 0
        relay.set()
        assert await reader.readexactly(4) == b"late"


async def test_dropped_bytes_never_come() -> None:
    async with echoing() as relay, connected(relay) as (reader, writer):
        relay.set(forward=Faults(blackhole="drop"))
        writer.write(b"lost")
        await eventually(lambda: relay.counts["forward_dropped_bytes"] == 4, WAIT_S)
        relay.set()
        writer.write(b"kept")
        assert await reader.readexactly(4) == b"kept"


async def test_refuses_connections_when_told_to() -> None:
    async with echoing() as relay:
        relay.set(refusing=True)
        with pytest.raises(OSError):
            await exchange(relay, b"x")
        assert relay.counts["refused"] == 1
        relay.set()
        assert await exchange(relay, b"x") == b"x"


async def test_a_target_that_is_not_there_resets_the_client() -> None:
    with Relay(Address("127.0.0.1", 1)) as relay:
        with pytest.raises(OSError):
            await exchange(relay, b"x")
        assert relay.counts["broken"] == 1


async def test_runs_as_a_process_with_commands_on_stdin() -> None:
    async with echoing() as inner:
        command = (sys.executable, "-m", "tests.faults.relay", "--target", str(inner.address))
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            listening = msgspec.json.decode(await process.stdout.readline())["listening"]
            process.stdin.write(b'{"forward": {"flip_at": [0]}}\n')
            assert msgspec.json.decode(await process.stdout.readline()) == {}
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_connection(*Address.parse(listening))
                writer.write(b"abc")
                assert await reader.readexactly(3) == b"\x21bc"
                writer.close()
        finally:
            process.kill()
            await process.communicate()
