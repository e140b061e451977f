"""Asking a proxy and reading what it answers."""

import json
from typing import Any

from tests.proxy.conftest import System

Json = dict[str, Any]


async def post(system: System, path: str, **body: object) -> Json:
    reply = await system.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: Json = reply.json()
    return found


async def chunks_of(system: System, path: str, **body: object) -> list[Json]:
    reply = await system.client.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def streamed_text(chunks: list[Json], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )
