"""A proxy's end of the control channel that stands still again and again while a worker talks on.

python -m tests.common.flooded          exits with 0 when it lived through it
"""

import asyncio
import subprocess
import sys
import time
from contextlib import suppress

from common.channel import ProxyChannel, WorkerChannel
from common.messages import Outputs, Ping, Status, Tokens, Welcome
from tests.proxy.scripted import status_of

ROUNDS = 4
READS_S = 1.0
STANDS_STILL_S = 4.5
MUCH = Outputs((Tokens("x" * 4000, 0, 0),))


async def talk(address: str) -> None:
    channel = ProxyChannel(address, "worker")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_say_for_ever(channel))
        while True:
            with suppress(ConnectionError):
                await channel.receive()


async def _say_for_ever(channel: ProxyChannel) -> None:
    while True:
        with suppress(ConnectionError):
            channel.send(status_of("decode", "worker"))
            for _ in range(100):
                channel.send(MUCH)
        await asyncio.sleep(0.005)


async def listen() -> None:
    channel = WorkerChannel("tcp://127.0.0.1:0")
    worker = subprocess.Popen([sys.executable, "-m", "tests.common.flooded", channel.address])
    try:
        for _ in range(ROUNDS):
            await _read(channel, time.monotonic() + READS_S)
            time.sleep(STANDS_STILL_S)  # noqa: ASYNC251 (that is the point)
        await _read(channel, time.monotonic() + READS_S)
    finally:
        worker.kill()
        worker.wait()
        channel.close()


async def _read(channel: WorkerChannel, until: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(until - time.monotonic()):
            while time.monotonic() < until:
                peer, message = await channel.receive()
                with suppress(ConnectionError):
                    channel.send(peer, Welcome("proxy") if isinstance(message, Status) else Ping("proxy"))


if __name__ == "__main__":
    asyncio.run(talk(sys.argv[1]) if len(sys.argv) > 1 else listen())
