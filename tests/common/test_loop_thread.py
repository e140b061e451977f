"""An event loop in a thread of its own: what runs there, and how it stands back."""

import asyncio
import os
import sys
import threading

import pytest

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


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux")
async def test_a_loop_that_stands_back_leaves_the_other_threads_as_they_are() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    back, beside = LoopThread("back", niceness=3), LoopThread("beside")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert os.getpriority(os.PRIO_PROCESS, await back.run(here())) == min(own + 3, 19)
            assert os.getpriority(os.PRIO_PROCESS, await beside.run(here())) == own
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    finally:
        back.close()
        beside.close()
