"""A ZeroMQ socket with its monitor, read in an event loop without polling and without a thread of our own."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kv_transfer.memory import Buffer

READ_BURST = 32  # messages read before other tasks get their turn


class Owner(Protocol):
    """Takes what a socket reads."""

    def arrived(self, frames: Sequence[zmq.Frame]) -> None: ...

    def happened(self, event: int, descriptor: int) -> None: ...


class Socket:
    """Belongs to the event loop in which it was made."""

    def __init__(self, kind: zmq.SocketType, events: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner: Owner | None = None
        self.raw: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._monitor: zmq.Socket[bytes] = self.raw.get_monitor_socket(events)

    def start(self, owner: Owner) -> None:
        self._owner = owner
        self._loop.add_reader(self.raw.FD, self.read)
        self._loop.add_reader(self._monitor.FD, self.read_events)
        # Their descriptors tell of changes only: look once at what is there already.
        self._loop.call_soon(self.read_events)
        self._loop.call_soon(self.read)

    def post(self, parts: Iterable[Buffer], last: Callable[[], bytes]) -> None:
        """Send one message, copied; ``last`` is asked for when the other parts are out. Raises
        ``zmq.ZMQError``: EHOSTUNREACH where there is no such peer, EAGAIN where it has taken nothing for
        long."""
        is_begun = False
        try:
            for part in parts:
                self.raw.send(part, zmq.NOBLOCK | zmq.SNDMORE)
                is_begun = True
            self.raw.send(last(), zmq.NOBLOCK)
        except BaseException:
            if is_begun:  # or the next message, perhaps another peer's, would be taken for the rest of this
                with suppress(zmq.ZMQError):
                    self.raw.send(b"", zmq.NOBLOCK)
            raise
        # Sending may have used up the notice that something arrived.
        if cast(int, self.raw.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.read)

    def read(self) -> None:
        for _ in range(READ_BURST):
            if self._owner is None:
                return
            try:
                frames = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._owner.arrived(frames)
        self._loop.call_soon(self.read)

    def read_events(self) -> None:
        while self._owner is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._owner.happened(int(event["event"]), int(event["value"]))

    def close(self) -> None:
        """What was posted still goes out, for as long as the socket's linger option allows."""
        if self.raw.closed:
            return
        if self._owner is not None:
            self._owner = None
            self._loop.remove_reader(self.raw.FD)
            self._loop.remove_reader(self._monitor.FD)
        self.raw.disable_monitor()
        self._monitor.close(linger=0)
        self.raw.close()
