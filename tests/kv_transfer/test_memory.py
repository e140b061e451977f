from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.memory import cut, flat, scatter, size_of

buffers = st.lists(st.binary(max_size=50), max_size=12)


def into_places(sizes: list[int], total: int) -> list[memoryview]:
    """Buffers of these sizes, and a last one that makes them ``total`` bytes."""
    places = []
    for size in sizes:
        size = min(size, total)
        places.append(memoryview(bytearray(size)))
        total -= size
    return [*places, memoryview(bytearray(total))]


@given(buffers, st.lists(st.integers(0, 60), max_size=12))
def test_scattering_keeps_every_byte_in_order(source: list[bytes], sizes: list[int]) -> None:
    into = into_places(sizes, size_of(source))
    scatter(source, into)
    assert b"".join(into) == b"".join(source)


@given(buffers, st.integers(1, 40), st.integers(1, 40))
def test_cutting_keeps_every_byte_in_order_and_to_the_sizes(
    source: list[bytes], piece_bytes: int, gather_bytes: int
) -> None:
    pieces = list(cut(source, piece_bytes, min(gather_bytes, piece_bytes)))
    assert b"".join(pieces) == b"".join(source)
    assert all(0 < len(piece) <= piece_bytes for piece in pieces)


def test_small_neighbours_are_put_together_and_large_buffers_are_not_copied() -> None:
    large = bytes(100)
    pieces = list(cut([b"a", b"b", large, b"c", b"d"], piece_bytes=60, gather_bytes=10))
    assert [len(piece) for piece in pieces] == [2, 60, 40, 2]
    assert isinstance(pieces[1], memoryview) and pieces[1].obj is large


def test_buffers_of_other_types_count_and_move_by_their_bytes() -> None:
    numbers = array("d", [1.0, 2.0])
    assert size_of([memoryview(numbers), b"xyz", bytearray(4)]) == 23
    copied = array("d", [0.0, 0.0])
    scatter([memoryview(numbers)], [memoryview(copied)])
    assert copied == numbers


def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(TypeError):
        list(flat([memoryview(bytes(10))[::2]]))
