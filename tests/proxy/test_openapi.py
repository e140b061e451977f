"""The description of the API is true: of paths, of fields, and of what is refused."""

from pathlib import Path
from typing import Any

import pytest

from proxy.openapi import ACTIONS, BODIES, READS
from proxy.responses_schema import ResponsesBody
from proxy.schema import ChatBody, CompletionBody, Options
from tests.proxy.conftest import System
from tests.proxy.scripted import speaks

ROOT = Path(__file__).parents[2]


async def description(system: System) -> dict[str, Any]:
    reply = await system.client.get("/openapi.json")
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


async def test_every_path_it_names_exists(system: System) -> None:
    paths = (await description(system))["paths"]
    assert set(paths) == {*BODIES, *READS, *(path for _, path in ACTIONS)}
    for path, methods in paths.items():
        (method,) = methods
        reply = await system.client.request(
            method, path.replace("{name}", "tiny"), json={} if method == "post" else None
        )
        assert reply.status_code not in (404, 405), path
        assert str(reply.status_code) in methods[method]["responses"], (path, reply.status_code)


async def test_every_path_that_exists_is_named(system: System) -> None:
    named = (await description(system))["paths"]
    for path in ("/v1/embeddings", "/v1/rerank", "/docs", "/redoc", "/v1/audio/speech"):
        assert path not in named
        assert (await system.client.post(path, json={})).status_code == 404


async def test_every_reference_leads_somewhere(system: System) -> None:
    found = await description(system)
    schemas = found["components"]["schemas"]

    def check(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/components/schemas/") in schemas
            for child in node.values():
                check(child)
        elif isinstance(node, list):
            for child in node:
                check(child)

    check(found)


async def test_bounds_that_are_described_are_kept(system: System) -> None:
    """Just outside of every numeric bound a request is refused with the field's name."""
    worker = await system.worker("decode", speaks(b"ok"))
    schemas = (await description(system))["components"]["schemas"]
    num_checked = 0
    for path, name, base in (
        ("/v1/completions", "completions_body", {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", "chat_completions_body", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", "responses_body", {"input": "x"}),
    ):
        for field, schema in schemas[name]["properties"].items():
            for part in schema.get("anyOf", [schema]):
                for bound, step in (
                    ("minimum", -1),
                    ("maximum", 1),
                    ("exclusiveMinimum", 0),
                    ("maxLength", 1),
                ):
                    if bound not in part:
                        continue
                    value: Any = part[bound] + step
                    if bound == "maxLength":
                        value = "x" * value
                    reply = await system.client.post(path, json={**base, field: value})
                    assert reply.status_code == 400, (path, field, value)
                    assert reply.json()["error"]["param"] == field
                    num_checked += 1
    assert num_checked > 50
    assert worker.generates == []


@pytest.mark.parametrize("kind", [Options, CompletionBody, ChatBody, ResponsesBody])
def test_every_parameter_is_in_the_documentation(kind: Any) -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in text]
    assert missing == []
