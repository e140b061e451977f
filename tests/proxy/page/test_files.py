"""The page's files and its stream, as HTTP clients see them."""

import asyncio
import json
import re
import signal

import httpx
import pytest

from common.config import ProxyConfig
from proxy.page import EVENTS, FILES, STATIC
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.scripted import WAIT_S
from tests.proxy.test_process import proxy_process

MAX_PAGE_BYTES = 300_000


async def first_event(client: httpx.AsyncClient, **headers: str) -> dict[str, object]:
    async with client.stream("GET", EVENTS, headers=headers) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for line in reply.aiter_lines():
            found: dict[str, object] = json.loads(line.removeprefix("data: "))
            return found
    raise AssertionError("the stream ended without an event")


async def test_every_file_of_the_page_is_served_and_they_are_small(system: System) -> None:
    size = 0
    for path in FILES:
        reply = await system.client.get(path)
        assert reply.status_code == 200
        size += len(reply.content)
        again = await system.client.get(path, headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert size < MAX_PAGE_BYTES
    assert {"/", "/page/main.js", "/page/page.css", "/page/uplot.js"} <= set(FILES)


def test_all_that_the_page_names_is_among_its_files() -> None:
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        named = re.findall(r'(?:src|href)="(page/[^"]+)"', text)
        named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        assert {f"/{name}" for name in named} <= set(FILES), path.name
        if not path.name.startswith("uplot"):
            others = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
            assert others == set(), f"{path.name} needs the network"


async def test_nothing_but_its_own_files_may_run_in_the_page(system: System) -> None:
    policy = (await system.client.get("/")).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy


async def test_the_stream_begins_with_a_snapshot_and_goes_on(system: System) -> None:
    worker = await system.worker("decode", name="decode-0")
    async with system.client.stream("GET", EVENTS) as reply, asyncio.timeout(WAIT_S):
        lines = await some_data(reply, 2)
    first, second = (json.loads(line) for line in lines)
    assert [(one["name"], one["id"]) for one in first["workers"]] == [("decode-0", worker.incarnation)]
    assert second["at"] > first["at"]


async def some_data(reply: httpx.Response, count: int) -> list[str]:
    found: list[str] = []
    async for line in reply.aiter_lines():
        found += [line.removeprefix("data: ")] if line else []
        if len(found) == count:
            break
    return found


async def test_the_stream_wants_a_key_where_the_api_does_and_the_files_do_not(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(api_key=("secret",))) as system:
        assert (await system.client.get("/")).status_code == 200
        assert (await system.client.get("/page/main.js")).status_code == 200
        assert (await system.client.get(EVENTS)).status_code == 401
        assert (await first_event(system.client, Authorization="Bearer secret"))["model"] == "tiny"


async def test_an_open_page_does_not_keep_a_proxy_from_ending() -> None:
    async with proxy_process() as (process, client, _), client.stream("GET", EVENTS) as reply:
        lines = reply.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):  # a stream that goes on would be waited for longer than that
            async for _ in lines:
                pass
            assert await process.wait() == 0


@pytest.mark.parametrize(
    "path", ["/page/", "/page/nothing.js", "/page/../__init__.py", "/page/uplot.LICENSE"]
)
async def test_there_are_no_other_files(system: System, path: str) -> None:
    assert (await system.client.get(path)).status_code == 404
