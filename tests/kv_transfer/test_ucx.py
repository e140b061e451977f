"""What only the UCX transport does."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import transport
from kv_transfer.memory import flat, scatter
from kv_transfer.transport import Connection

ucx = pytest.importorskip("kv_transfer.ucx", reason="needs the package ucxx")
TIMEOUT_S = 30.0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.lists(st.integers(0, 60), max_size=10))
def test_pieces_land_in_their_place_or_on_the_way_to_it(sizes: list[int], targets: list[int]) -> None:
    total = sum(sizes)
    whole = bytearray(total)
    bounds = sorted({0, total, *(min(sum(targets[:index]), total) for index in range(len(targets)))})
    into = [memoryview(whole)[start:end] for start, end in itertools.pairwise(bounds)]
    payload = bytes(index % 256 for index in range(total))
    start = 0
    places = list(ucx.fit(sizes, into))
    for size, place in zip(sizes, places, strict=True):
        place.landing[:] = payload[start : start + size]
        start += size
        if place.parts:
            scatter([place.landing], place.parts)
    assert bytes(whole) == payload
    assert all(view.nbytes for place in places for view in flat([place.landing]))


@pytest.mark.parametrize(
    ("version", "altered", "reason"),
    [
        (b"hello", False, "does not speak UCX"),
        (b"ucx 0.9.9", False, r"versions of UCX: b'0\.9\.9' and "),
        (b"", True, "address was altered"),  # with our own version
    ],
)
async def test_a_peer_whose_ucx_does_not_fit_is_refused_by_name(
    version: bytes, altered: bool, reason: str
) -> None:
    async def wait(connection: Connection) -> None:
        await connection.receive()

    listener = await transport.listen("ucx://127.0.0.1:0", wait)
    async with asyncio.timeout(TIMEOUT_S):
        connection = await transport.connect(listener.address.replace("ucx://", "zmq+tcp://"), TIMEOUT_S)
        header, size = await connection.receive()
        place = bytearray(size)
        await connection.receive_payload([memoryview(place)])
        place[-1] ^= altered
        await connection.send(version or header, [place])
        with pytest.raises(ConnectionError, match=reason):
            await connection.receive()
        await connection.close()
    await listener.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",
        b"\x00\x00\x02\x00\x00\x00\x01",
        b"\x00\x00\x01\x00\x00\x00\x00",
        b"\x00\x00\x01\xff\xff\xff\xff",
        b"\x01\x00\x00",
    ],
)
async def test_impossible_sizes_of_pieces_end_the_connection(content: bytes) -> None:
    seen: list[str] = []

    async def read(connection: Connection) -> None:
        try:
            await connection.receive()
        except ConnectionError as error:
            seen.append(str(error))

    listener = await transport.listen("ucx://127.0.0.1:0", read)
    async with asyncio.timeout(TIMEOUT_S):
        connection = await transport.connect(listener.address, TIMEOUT_S)
        await connection._inner.send_unchecked(content)  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError, match="impossible sizes"):
            await connection.receive()
        await connection.close()
    await listener.close()
    assert "impossible sizes" in seen[0]
