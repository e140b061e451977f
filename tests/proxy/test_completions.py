import json
from typing import Any

from tests.proxy.conftest import System
from tests.proxy.scripted import speaks

Json = dict[str, Any]


async def complete(system: System, **body: object) -> Json:
    reply = await system.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: Json = reply.json()
    return found


async def chunks_of(system: System, path: str, **body: object) -> list[Json]:
    reply = await system.client.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def test_a_completion_of_a_decode_worker_alone(system: System) -> None:
    await system.worker("decode", speaks(b"hello world"))
    reply = await complete(system, prompt="say", max_tokens=5)
    assert reply["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["model"] == "tiny"
