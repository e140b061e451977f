"""A client that costs little: it counts the events of streams and the time to the first, and looks no
closer. One connection for each stream, kept alive between requests."""

import asyncio
import json
import time
from typing import NamedTuple


class Streamed(NamedTuple):
    first_s: float  # from sending the request to the first byte of the body
    total_s: float
    num_events: int


class Connection:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(self, path: str, body: dict[str, object]) -> Streamed:
        """Raises ``RuntimeError`` for a reply other than 200, ``ConnectionError`` for one that breaks off."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        assert self._reader is not None
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + content)
        found = await self._reader.readuntil(b"\r\n\r\n")
        if not found.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(found.split(b"\r\n", 1)[0].decode())
        first, count, tail = 0.0, 0, b""
        while not tail.endswith(b"0\r\n\r\n"):  # the last chunk of a chunked body
            data = await self._reader.read(1 << 16)
            if not data:
                raise ConnectionError("the stream broke off")
            first = first or time.perf_counter() - began
            count += (tail[-5:] + data).count(b"data: ") - tail[-5:].count(b"data: ")
            tail = (tail + data)[-16:]
        return Streamed(first, time.perf_counter() - began, count)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
