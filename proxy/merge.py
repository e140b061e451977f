"""Several streams read as one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
_End = Exception | None  # how a stream ended


def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Items of all ``streams`` as they come. The first exception of any ends all; so does closing this
    one."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[tuple[Item] | _End] = asyncio.Queue(2 * len(streams))
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            entry = await queue.get()
            if isinstance(entry, tuple):
                yield entry[0]
            elif entry is None:
                num_open -= 1
            else:
                raise entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(stream: AsyncGenerator[Item, None], queue: "asyncio.Queue[tuple[Item] | _End]") -> None:
    try:
        async with contextlib.aclosing(stream):
            async for item in stream:
                await queue.put((item,))
    except Exception as error:  # noqa: BLE001 (handed on to the reader, who raises it)
        await queue.put(error)
    else:
        await queue.put(None)
