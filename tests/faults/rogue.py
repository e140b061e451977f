"""A peer that speaks the transfer protocol to a decode worker, but not as it should."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from common import messages
from common.messages import Hello, Layout, Offer, Transfer
from kv_transfer import transport
from kv_transfer.transport import Connection
from tests.faults.cluster import Cluster

TIMEOUT_S = 20.0


class Rogue:
    def __init__(self, connection: Connection, layout: Layout) -> None:
        self.layout = layout
        self._connection = connection

    async def say(self, message: Transfer, payload: Sequence[bytes] = ()) -> None:
        await self.say_bytes(messages.encode(message), payload)

    async def say_bytes(self, header: bytes, payload: Sequence[bytes] = ()) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._connection.send(header, payload)

    async def hear(self) -> Transfer:
        async with asyncio.timeout(TIMEOUT_S):
            header, _ = await self._connection.receive()
        return messages.decode_transfer(header)

    async def offer(self, transfer_id: str, num_tokens: int, deadline_s: float = 60.0) -> Transfer:
        """The answer."""
        hashes = tuple(f"{transfer_id} {i}".encode() for i in range(num_tokens // self.layout.block_size))
        await self.say(Offer(transfer_id, transfer_id, 0, num_tokens, hashes, deadline_s))
        return await self.hear()


@asynccontextmanager
async def connected(
    cluster: Cluster, name: str, greeted: bool = True, **changes: Any
) -> AsyncIterator[Rogue]:
    """``changes`` are made to the layout, or to whom we expect to meet (``incarnation``)."""
    worker = (await cluster.workers())[name]
    expected = changes.pop("incarnation", worker["incarnation"])
    layout = msgspec.structs.replace(msgspec.convert(worker["layout"], Layout), **changes)
    connection = await transport.connect(worker["address"], TIMEOUT_S)
    try:
        rogue = Rogue(connection, layout)
        await rogue.say(Hello("rogue", expected, layout))
        if greeted:
            assert isinstance(await rogue.hear(), messages.Welcome)
        yield rogue
    finally:
        await connection.close()
