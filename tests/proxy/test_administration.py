"""What an administrator may do to workers, and nobody else."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from common.config import ProxyConfig
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.scripted import WAIT_S, speaks, speaks_in_two

BODY = {"prompt": "say", "max_tokens": 4}
ACTIONS = [("POST", "/workers/{}/drain"), ("DELETE", "/workers/{}")]


@pytest.fixture
async def system(model: ServedModel) -> AsyncIterator[System]:
    async with system_of(model, ProxyConfig(api_key=("user",), admin_key=("boss",))) as system:
        yield system


async def ask(system: System, method: str, path: str, key: str = "boss", **more: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await system.client.request(method, path, headers=headers, **more)  # type: ignore[arg-type]


async def state_of(system: System, incarnation: str) -> str:
    workers = (await ask(system, "GET", "/workers")).json()["workers"]
    return next(str(worker["state"]) for worker in workers if worker["incarnation"] == incarnation)


@pytest.mark.parametrize(("method", "path"), ACTIONS)
async def test_others_are_turned_away(system: System, model: ServedModel, method: str, path: str) -> None:
    worker = await system.worker("decode", speaks(b"okay"))
    path = path.format(worker.status.name)
    for key, status, code in (
        ("", 401, "invalid_api_key"),
        ("wrong", 401, "invalid_api_key"),
        ("user", 403, "admin_key_required"),
    ):
        reply = await ask(system, method, path, key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), key
    async with system_of(model, ProxyConfig(admin_key=("boss",))) as open_to_all:
        for key in ("", "wrong"):
            reply = await ask(open_to_all, method, path, key)
            assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
    async with system_of(model, ProxyConfig()) as without:
        assert (await ask(without, method, path, "boss")).status_code == 403
    assert worker.num_drains == 0 and worker.refusals == []
    assert await state_of(system, worker.incarnation) == "ready"


@pytest.mark.parametrize(("method", "path"), ACTIONS)
async def test_a_worker_that_is_not_there_is_404(system: System, method: str, path: str) -> None:
    reply = await ask(system, method, path.format("nobody"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "worker_not_found")
    assert "nobody" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ACTIONS)
async def test_of_two_with_one_name_the_incarnation_tells_which(
    system: System, method: str, path: str
) -> None:
    twins = [await system.worker("decode", name="twin") for _ in range(2)]
    reply = await ask(system, method, path.format("twin"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "worker_ambiguous")
    reply = await ask(system, method, path.format(twins[1].incarnation))
    assert reply.json()["incarnation"] == twins[1].incarnation
    assert await state_of(system, twins[0].incarnation) == "ready"


async def test_a_key_of_an_administrator_serves_for_all_else(system: System) -> None:
    await system.worker("decode", speaks(b"okay"))
    assert (await ask(system, "POST", "/v1/completions", json=BODY)).status_code == 200


async def test_a_worker_that_drains_is_told_once_and_gets_nothing_more(system: System) -> None:
    one, other = [await system.worker("decode", speaks(b"okay")) for _ in range(2)]
    reply = await ask(system, "POST", f"/workers/{one.status.name}/drain")
    assert (reply.status_code, reply.json()["state"]) == (202, "draining")
    for _ in range(4):
        assert (await ask(system, "POST", "/v1/completions", json=BODY)).status_code == 200
    await one.until(lambda: one.num_drains == 1)
    assert (len(one.generates), len(other.generates)) == (0, 4)


async def test_what_a_removed_worker_was_doing_goes_on_elsewhere(system: System) -> None:
    seen = asyncio.Event()
    one = await system.worker("decode", speaks_in_two(b"okay", asyncio.Event()))
    body = BODY | {"stream": True}
    headers = {"Authorization": "Bearer user"}
    async with (
        asyncio.timeout(WAIT_S),
        system.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply,
    ):
        text = ""
        async for line in reply.aiter_lines():
            text += line
            if '"text"' in line and not seen.is_set():
                seen.set()
                other = await system.worker("decode", speaks(b"okay"))
                assert (await ask(system, "DELETE", f"/workers/{one.status.name}")).status_code == 200
    assert "[DONE]" in text and '"error"' not in text
    await one.until(lambda: bool(one.aborts))
    assert one.refusals == ["removed by DELETE /workers"]
    assert len(other.generates) == 1
    assert await state_of(system, one.incarnation) == "refused"


async def test_a_removed_worker_is_not_taken_back_when_it_connects_again(system: System) -> None:
    one = await system.worker("decode", speaks(b"okay"))
    await ask(system, "DELETE", f"/workers/{one.incarnation}")
    one.break_connection()
    await one.until(lambda: len(one.refusals) == 2)
    assert (await ask(system, "GET", "/ready")).status_code == 503
    await system.worker("decode", speaks(b"okay"), name=one.status.name)  # its successor is
    assert (await ask(system, "GET", "/ready")).status_code == 200
    reply = await ask(system, "POST", f"/workers/{one.incarnation}/drain")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "worker_not_ready")
