"""Reading bodies, whatever is in them."""

import gc
from typing import Any

import pytest

from proxy.errors import ApiError
from proxy.schema import read


def test_a_large_body_is_read_without_searches_for_garbage() -> None:
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        read(b"[" + b"[[]]," * 50_000 + b"[]]", list[Any])
    finally:
        gc.callbacks.remove(note)
    assert collections.count("start") <= 2  # what has waited comes after it, and not once in 700 lists


@pytest.mark.parametrize("body", [b"[", b"[]"])
def test_garbage_is_searched_for_again_after_a_body_that_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        read(body, dict[str, Any])
    assert gc.isenabled()
