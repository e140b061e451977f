"""A process at the other end of a connection, to be killed, stopped or left unread by tests.

``python -m tests.kv_transfer.peer_process listen|connect ADDRESS`` prints its address (or the one it has
connected to) once it is ready. It answers each message with the same one, stops reading after one with the
header ``stop reading``, and does nothing at all for some seconds after one with ``hold up``.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kv_transfer import transport
from kv_transfer.transport import Connection

START_TIMEOUT_S = 60.0
HELD_UP_S = 4.0


async def echo(connection: Connection) -> None:
    while True:
        header, payload_bytes = await connection.receive()
        if header == b"stop reading":
            await asyncio.Event().wait()
        if header == b"hold up":
            time.sleep(HELD_UP_S)  # noqa: ASYNC251 - the loop is meant to stand still
        payload = bytearray(payload_bytes)
        await connection.receive_payload([memoryview(payload)])
        await connection.send(header, [payload])


async def listen(address: str) -> None:
    listener = await transport.listen(address, echo)
    print(listener.address, flush=True)
    await asyncio.Event().wait()


async def connect(address: str) -> None:
    connection = await transport.connect(address, START_TIMEOUT_S)
    print(address, flush=True)
    await connection.send(b"hello")
    await echo(connection)


@asynccontextmanager
async def started(role: str, address: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its address; it is killed in the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, role, address, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
        yield process, line.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run({"listen": listen, "connect": connect}[sys.argv[1]](sys.argv[2]))
