"""uvicorn's side of a connection, with one difference: the head of a reply leaves together with what follows
it. Each write is a call of the kernel and wakes the client, and a first token is what clients wait for."""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        held = HeldHeads(cast("asyncio.Transport", transport), self.loop)
        super().connection_made(cast("asyncio.Transport", held))


class HeldHeads:
    """As much of a transport as uvicorn uses. It keeps the head of a reply until the next write, but no
    longer than a turn of the event loop."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.set_protocol = transport.set_protocol

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):  # 100 is no reply yet
            self._head = data
            self._loop.call_soon(self._release)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._release()
        self._transport.close()

    def _release(self) -> None:
        if self._head and not self._transport.is_closing():
            self.write(b"")
