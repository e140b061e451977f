import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.window import MESSAGE_COST, MIN_WINDOW_BYTES, Window

TIMEOUT_S = 10.0


def opened(size: int = MIN_WINDOW_BYTES) -> Window:
    window = Window()
    window.open(size)
    return window


@given(st.integers(MIN_WINDOW_BYTES, 1 << 30), st.integers(0, 1 << 40))
def test_a_message_of_any_size_finds_room_though_credit_comes_late(size: int, message_bytes: int) -> None:
    window = opened(size)
    assert window.cost(message_bytes) <= size - size // 4
    assert window.cost(message_bytes) >= min(MESSAGE_COST, size // 2)


async def test_taking_waits_for_credit() -> None:
    window = opened()
    await window.take(MIN_WINDOW_BYTES - 10)
    taking = asyncio.create_task(window.take(20))
    window.give(5)
    done, _ = await asyncio.wait([taking], timeout=0.1)
    assert not done
    window.give(5)
    async with asyncio.timeout(TIMEOUT_S):
        await taking


async def test_taking_at_once_neither_waits_nor_overtakes_who_waits() -> None:
    window = opened()
    assert window.try_take(MIN_WINDOW_BYTES - 10)
    assert not window.try_take(20)
    taking = asyncio.create_task(window.take(20))
    await asyncio.wait([taking], timeout=0.01)
    assert not window.try_take(5)
    window.give(15)
    async with asyncio.timeout(TIMEOUT_S):
        await taking
    assert window.try_take(5)
    window.shut()
    assert not window.try_take(0)


async def test_credit_beyond_the_window_counts_for_nothing() -> None:
    window = opened()
    window.give(1 << 60)
    await window.take(MIN_WINDOW_BYTES)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await window.take(1)


async def test_nobody_waits_at_a_window_that_is_shut() -> None:
    window = opened()
    await window.take(MIN_WINDOW_BYTES)
    waiting = [asyncio.create_task(window.take(MIN_WINDOW_BYTES)) for _ in range(3)]
    await asyncio.wait(waiting, timeout=0.05)
    window.shut()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*waiting)
