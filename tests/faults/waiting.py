"""Waiting for what another process will do: looked at again and again, never for ever."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def eventually(
    condition: Callable[[], Any | Awaitable[Any]], within_s: float, what: str = "", pause_s: float = 0.02
) -> Any:
    """The first true result of ``condition``. ``AssertionError`` naming its last result when there is
    none."""
    give_up_at = time.monotonic() + within_s
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not within {within_s:g} s: {what or condition}; last seen: {result!r}")
        await asyncio.sleep(pause_s)
