"""When the parts of a reply leave."""

import asyncio

from proxy.connection import HeldHeads

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire(asyncio.Transport):
    """Notes every write, as the kernel would be called."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_a_head_leaves_with_the_first_part_and_all_others_at_once() -> None:
    wire = Wire()
    held = HeldHeads(wire, asyncio.get_running_loop())
    held.write(HEAD)
    held.write(b"first")
    held.write(b"second")
    assert wire.writes == [HEAD + b"first", b"second"]
    held.write(HEAD)
    held.write(b"of the next")
    assert wire.writes[2:] == [HEAD + b"of the next"]


async def test_a_head_waits_no_longer_than_a_turn() -> None:
    wire = Wire()
    HeldHeads(wire, asyncio.get_running_loop()).write(HEAD)
    assert wire.writes == []
    await asyncio.sleep(0)
    assert wire.writes == [HEAD]


async def test_a_word_before_the_reply_leaves_at_once() -> None:
    wire = Wire()
    HeldHeads(wire, asyncio.get_running_loop()).write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert wire.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]


async def test_closing_lets_a_head_leave_unless_the_client_is_gone() -> None:
    wire = Wire()
    held = HeldHeads(wire, asyncio.get_running_loop())
    held.write(HEAD)
    held.close()
    assert (wire.writes, wire.closed) == ([HEAD], True)
    gone = Wire()
    held = HeldHeads(gone, asyncio.get_running_loop())
    held.write(HEAD)
    gone.close()
    held.close()
    await asyncio.sleep(0)
    assert gone.writes == []
