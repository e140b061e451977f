"""The live page at ``/``: the files a browser gets, and the stream of snapshots that it draws.

The files hold no data: everybody gets them. The stream has what ``proxy/live.py`` says and wants a key where
the API does. It ends when the proxy is told to stop, which would otherwise wait for every open page.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from proxy.live import Live

STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
EVENTS = "/live/events"
INTERVAL_S, IDLE_INTERVAL_S = 1.0, 2.0  # every drawing costs the browser 1 to 3 % of a core for that second
HEADERS = {
    "Cache-Control": "no-cache",  # asks each time whether the file has changed
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(
        content, f"{TYPES[path.suffix]}; charset=utf-8", f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    )


FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": _read(path)
    for path in sorted(STATIC.iterdir())
    if path.suffix in TYPES
}


def add_page(app: FastAPI, live: Live, stopping: asyncio.Event) -> None:
    """``stopping`` ends the streams."""

    async def show(request: Request) -> Response:
        file = FILES[request.url.path]
        headers = HEADERS | {"ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    for path in FILES:
        app.get(path)(show)

    @app.get(EVENTS)
    async def events() -> Response:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(live, stopping), headers=headers, media_type="text/event-stream")


async def _events(live: Live, stopping: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """A snapshot at once, then one every ``INTERVAL_S``; every ``IDLE_INTERVAL_S`` while nothing goes on."""
    while not stopping.is_set():
        yield b"data: %b\n\n" % msgspec.json.encode(live.snapshot())
        try:
            async with asyncio.timeout(IDLE_INTERVAL_S if live.is_idle else INTERVAL_S):
                await stopping.wait()
        except TimeoutError:
            continue
