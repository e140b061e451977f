"""An event loop in a thread of its own: what runs there."""

import asyncio
import threading

from common.loop_thread import LoopThread

TIMEOUT_S = 30.0


async def here() -> int:
    return threading.get_native_id()


async def test_results_come_back_and_calls_keep_their_order() -> None:
    loop = LoopThread("test")
    done = asyncio.get_running_loop()
    heard: asyncio.Queue[int] = asyncio.Queue()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert await loop.run(here()) != threading.get_native_id()
            for number in range(20):
                loop.call(done.call_soon_threadsafe, heard.put_nowait, number)
            assert [await heard.get() for _ in range(20)] == list(range(20))
    finally:
        loop.close()
    loop.call(heard.put_nowait, 20)
    assert heard.empty()
