"""The surface besides generation: keys, ids, paths, state."""

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import ProxyConfig
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.scripted import WAIT_S, speaks, speaks_in_two

BODY = {"prompt": "say", "max_tokens": 2}


async def test_a_key_is_asked_for_everywhere_but_at_probes(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(api_key=("first", "second"))) as system:
        await system.worker("decode", speaks(b"ok"))
        for key in ("first", "second"):
            reply = await system.client.post(
                "/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}
            )
            assert reply.status_code == 200
        for header in (
            "Bearer wrong",
            "Bearer",
            "Basic first",
            "first",
            "Bearer first second",
            "Bearer first\xe9",
        ):
            headers = httpx.Headers({"Authorization": header}, encoding="latin-1")
            reply = await system.client.post("/v1/completions", json=BODY, headers=headers)
            assert reply.status_code == 401, header
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/workers", "/tokenize", "/nothing"):
            assert (await system.client.get(path)).status_code == 401
        for path in ("/health", "/live", "/ready", "/metrics", "/version"):
            assert (await system.client.get(path)).status_code == 200


@pytest.mark.parametrize("given", ["abc", "a/b c", "x" * 300, "žluťoučký"])
async def test_the_client_gets_its_own_request_id_back(system: System, given: str) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    reply = await system.client.post(
        "/v1/completions", json=BODY, headers=[(b"X-Request-Id", given.encode())]
    )
    assert reply.status_code == 200
    (echoed,) = [value for name, value in reply.headers.raw if name.lower() == b"x-request-id"]
    assert echoed == given.encode()
    assert given not in worker.generates[0].request_id


async def test_errors_have_an_id_too(system: System) -> None:
    reply = await system.client.post("/v1/completions", json={}, headers={"X-Request-Id": "mine"})
    assert (reply.status_code, reply.headers["x-request-id"]) == (400, "mine")
    assert (await system.client.get("/live")).headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/rerank", 404),
        ("GET", "/nowhere", 404),
    ],
)
async def test_paths_that_do_not_exist_say_so(system: System, method: str, path: str, status: int) -> None:
    reply = await system.client.request(method, path)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert path in error["message"]


async def until_ready(system: System, expected: bool) -> dict[str, object]:
    async with asyncio.timeout(WAIT_S):
        while True:
            reply = await system.client.get("/ready")
            if (reply.status_code == 200) == expected:
                found: dict[str, object] = reply.json()
                return found
            await asyncio.sleep(0.02)


async def test_readiness_tells_the_truth(system: System) -> None:
    state = await until_ready(system, False)
    assert state == {"ready": False, "missing": ["decode"], "workers": {"prefill": 0, "decode": 0}}
    decode = await system.worker("decode", speaks(b"ok"))
    await until_ready(system, True)
    prefill = await system.worker("prefill")
    assert (await until_ready(system, True))["missing"] == []
    decode.close()
    assert (await until_ready(system, False))["missing"] == ["decode"]
    assert (await system.client.get("/health")).status_code == 503
    assert (await system.client.get("/live")).status_code == 200
    await system.worker("decode", speaks(b"ok"))
    await until_ready(system, True)
    prefill.close()
    async with asyncio.timeout(WAIT_S):
        while (await until_ready(system, True))["missing"] != ["prefill"]:
            await asyncio.sleep(0.02)


async def test_the_model_is_listed_with_its_length(system: System) -> None:
    reply = await system.client.get("/v1/models")
    (card,) = reply.json()["data"]
    assert (card["id"], card["max_model_len"], card["object"]) == ("tiny", 4096, "model")
    assert (await system.client.get("/v1/models/tiny")).json() == card
    assert (await system.client.get("/v1/models/other")).status_code == 404


async def test_text_to_tokens_and_back(system: System) -> None:
    reply = await system.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    assert reply.json() == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "�", "�"],
    }
    messages = [{"role": "user", "content": "x"}]
    reply = await system.client.post("/tokenize", json={"messages": messages})
    assert bytes(reply.json()["tokens"]) == b"<user>x<assistant>"
    reply = await system.client.post("/detokenize", json={"tokens": [104, 195, 169]})
    assert reply.json() == {"prompt": "hé"}
    assert (await system.client.post("/tokenize", json={})).status_code == 400
    assert (await system.client.post("/detokenize", json={"tokens": [5000]})).status_code == 400


async def test_workers_are_shown(system: System) -> None:
    decode = await system.worker("decode", counters={"transfers_received_total": 3.0})
    (shown,) = (await system.client.get("/workers")).json()["workers"]
    assert (shown["name"], shown["role"], shown["state"]) == (decode.status.name, "decode", "ready")
    assert shown["incarnation"] == decode.incarnation
    assert shown["load"]["num_blocks"] == 1000


async def test_metrics_count_what_happened(system: System) -> None:
    seen = asyncio.Event()
    counters = {"transfers_received_total": 3.0, "transfers_refused_total:overloaded": 2.0}
    decode = await system.worker("decode", speaks_in_two(b"hello", seen), counters=counters)
    body = {"prompt": "say", "max_tokens": 5}
    await system.stream(body, seen)
    await system.client.post("/v1/completions", json=body)
    await system.client.post("/v1/completions", json={"prompt": "say", "temperature": -1})
    await system.settled()
    families = text_string_to_metric_families((await system.client.get("/metrics")).text)
    samples = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
    assert samples["baton_requests_total", "success"] == 2
    assert samples["baton_request_success_total", "length"] == 2
    assert samples["baton_prompt_tokens_total",] == 6
    assert samples["baton_generation_tokens_total",] == 10
    assert samples["baton_time_to_first_token_seconds_count",] == 2
    assert samples["baton_e2e_request_latency_seconds_count",] == 2
    assert samples["baton_inter_token_latency_seconds_count",] > 0
    assert samples["baton_requests_in_flight",] == 0
    assert samples["baton_requests_refused_total", "invalid_value"] == 1
    assert samples["baton_worker_up", "decode", decode.status.name] == 1
    assert samples["baton_transfers_received_total", "decode", decode.status.name] == 3
    assert samples["baton_transfers_refused_total", "decode", decode.status.name, "overloaded"] == 2


async def test_nothing_a_client_sends_chooses_a_worker(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    headers = {"x-prefiller-url": "http://127.0.0.1:1", "x-decode-host": "127.0.0.1:1", "forwarded": "for=x"}
    body = BODY | {"request_id": "mine", "decode": {"address": "tcp://127.0.0.1:1", "incarnation": "x"}}
    reply = await system.client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200
    assert worker.generates[0].decode is None
    assert worker.generates[0].request_id != "mine"


async def test_rubbish_on_the_control_port_harms_nobody(system: System) -> None:
    await system.worker("decode", speaks(b"ok"))
    host, port = system.control.removeprefix("tcp://").split(":")
    for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95" * 1000, b"\xff" * 64, b""):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(rubbish)
        writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            await reader.read()
        writer.close()
    assert (await system.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_reader_that_is_slow_gets_everything_and_delays_nobody(system: System) -> None:
    await system.worker("decode", speaks(b"x" * 3000))
    host, port = system.client.base_url.host, system.client.base_url.port
    reader, writer = await asyncio.open_connection(host, port, limit=1024)
    body = json.dumps(
        {"prompt": "say", "max_tokens": 3000, "stream": True, "return_token_ids": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    assert (await system.client.post("/v1/completions", json=BODY)).status_code == 200
    async with asyncio.timeout(WAIT_S):
        text = await reader.read(-1)
    writer.close()
    assert text.count(b'"token_ids":[120') > 0
    assert b"data: [DONE]" in text
