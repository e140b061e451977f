"""Bodies: of requests, of bounded size and read in bounded time, and of replies in JSON."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from proxy.errors import ApiError

READ_TIMEOUT_S = 60.0


async def read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError; ClientDisconnect when the client leaves."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read(request, limit)
    except TimeoutError:
        text = f"the body did not arrive within {READ_TIMEOUT_S:.0f} s"
        raise ApiError(408, text, code="request_timeout", headers={"Connection": "close"}) from None


async def _read(request: Request, limit: int) -> bytes:
    """What is beyond the limit is read and dropped up to a second limit: a client that is still sending when
    the connection closes may never see why."""
    size, chunks = 0, []
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        elif size > 8 * limit:
            break
    if size > limit:
        text = f"the body is larger than {limit} bytes, which is the limit of this server"
        raise ApiError(413, text, code="request_too_large", headers={"Connection": "close"})
    return b"".join(chunks)


def as_json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
