import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from common.inbox import Inbox

WAIT_S = 20.0


@contextmanager
def pair() -> Iterator["tuple[Inbox, zmq.Socket[Any], zmq.Socket[Any]]"]:
    """An inbox, its socket, and the socket at the other end."""
    context: zmq.Context[zmq.Socket[Any]] = zmq.Context()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    far.connect(f"tcp://127.0.0.1:{near.bind_to_random_port('tcp://127.0.0.1')}")
    inbox = Inbox(near)
    try:
        yield inbox, near, far
    finally:
        inbox.close()
        context.destroy(linger=0)


async def test_messages_come_in_order_whether_or_not_somebody_waits() -> None:
    with pair() as (inbox, _, far):
        waiting = asyncio.create_task(inbox.receive())
        await asyncio.sleep(0)
        for number in range(100):
            far.send_multipart([b"message", str(number).encode()])
        found = [await asyncio.wait_for(waiting, WAIT_S)]
        found += [await asyncio.wait_for(inbox.receive(), WAIT_S) for _ in range(99)]
        assert found == [[b"message", str(number).encode()] for number in range(100)]


async def test_a_message_whose_news_was_taken_by_sending_is_still_heard() -> None:
    with pair() as (inbox, near, far):
        for number in range(200):
            waiting = asyncio.create_task(inbox.receive())
            await asyncio.sleep(0)
            far.send(str(number).encode())
            near.poll(round(1000 * WAIT_S))  # takes the news from the descriptor, as sending may
            inbox.look()
            assert await asyncio.wait_for(waiting, WAIT_S) == [str(number).encode()]


async def test_giving_up_waiting_loses_no_message() -> None:
    with pair() as (inbox, _, far):
        waiting = asyncio.create_task(inbox.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        far.send(b"after")
        assert await asyncio.wait_for(inbox.receive(), WAIT_S) == [b"after"]
