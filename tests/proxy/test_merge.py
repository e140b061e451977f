import asyncio
from collections.abc import AsyncGenerator

import pytest

from proxy.merge import merge


class Source:
    def __init__(self, *items: int, error: Exception | None = None, endless: bool = False) -> None:
        self.items = items
        self.error = error
        self.endless = endless
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                yield item
            if self.error is not None:
                raise self.error
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_all_items_come_and_each_stream_keeps_its_order(count: int) -> None:
    sources = [Source(*range(100 * i, 100 * i + 10)) for i in range(count)]
    found = [item async for item in merge([source.stream() for source in sources])]
    for source in sources:
        assert tuple(item for item in found if item in source.items) == source.items
        assert source.is_closed
    assert len(found) == 10 * count


@pytest.mark.parametrize("count", [1, 3])
async def test_the_first_error_ends_everything(count: int) -> None:
    others = [Source(1, endless=True) for _ in range(count - 1)]
    failing = Source(2, error=ValueError("so it is"))
    with pytest.raises(ValueError, match="so it is"):
        async for _ in merge([source.stream() for source in (*others, failing)]):
            pass
    assert all(source.is_closed for source in (*others, failing))


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_early_closes_all_streams(count: int) -> None:
    sources = [Source(1, endless=True) for _ in range(count)]
    merged = merge([source.stream() for source in sources])
    assert await anext(merged) == 1
    await merged.aclose()
    assert all(source.is_closed for source in sources)


async def test_a_stream_that_was_never_read_is_closed_too() -> None:
    merged = merge([Source(1).stream(), Source(2).stream()])
    await merged.aclose()
