"""Bodies: of requests, of bounded size and read in bounded time, and of replies in JSON."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from proxy.errors import ApiError

READ_TIMEOUT_S = 60.0


async def read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """Raises ApiError; ClientDisconnect when the client leaves."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        text = f"the body's Content-Encoding is {encoding[:50]!r}: this server takes bodies without any"
        raise ApiError(415, text, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read(receive, limit)
    except TimeoutError:
        text = f"the body did not arrive within {READ_TIMEOUT_S:.0f} s"
        raise ApiError(408, text, code="request_timeout", headers={"Connection": "close"}) from None


async def _read(receive: Receive, limit: int) -> bytes:
    """What is beyond the limit is read and dropped up to a second limit: a client that is still sending when
    the connection closes may never see why."""
    size, chunks, is_whole = 0, list[bytes](), False
    while not is_whole and size <= 8 * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        is_whole = not message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
    if size > limit:
        text = f"the body is larger than {limit} bytes, which is the limit of this server"
        raise ApiError(413, text, code="request_too_large", headers={"Connection": "close"})
    return b"".join(chunks)


def as_json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
