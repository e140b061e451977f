"""A ZeroMQ socket that one task of an event loop reads.

``zmq.asyncio`` makes futures for every message and asks the socket for its state again and again, which costs
as much as what the proxy does with the message. Here a message that waits is taken at once, and only who
finds none waits.

The socket's descriptor does not say that a message has come but that something has, and whatever is done with
the socket next takes that news: after sending, call ``look``.
"""

import asyncio
from typing import Any

import zmq


class Inbox:
    def __init__(self, socket: "zmq.Socket[Any]") -> None:
        self._socket = socket
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # which watches the descriptor

    async def receive(self) -> list[bytes]:
        """The frames of the next message."""
        while True:
            try:
                return self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                self._news.clear()
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._loop.add_reader(self._socket.fileno(), self._news.set)
            await self._news.wait()

    def look(self) -> None:
        """Whether a message waits, when the descriptor may not tell any more."""
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN.value:
            self._news.set()

    def close(self) -> None:
        """To be called before the socket is closed. Safe to repeat."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._loop = None
