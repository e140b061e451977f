"""Routing as clients see it: headers in, headers out, over real sockets."""

import logging

import msgspec
import pytest

from common.config import ProxyConfig
from common.hashing import block_hashes
from common.messages import BlocksStored, Pace
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.scripted import LAYOUT, LOAD, MODEL, speaks
from tests.proxy.test_dispatcher import TEXT, complete, hands_over

PACE = Pace(prefill_tokens_per_s=1000.0, step_s=0.01)
PROMPT = "a prompt of some length, " * 4


async def test_the_route_is_told_with_what_was_predicted(system: System) -> None:
    decode = await system.worker("decode", speaks(TEXT), name="d")
    await system.worker("prefill", hands_over(decode), name="p", pace=PACE)
    reply = await complete(system)
    words = reply.headers["x-baton-route"].split()
    assert words[:3] == ["disaggregated", "prefill=p", "decode=d"]
    assert "cached=0/3" in words
    told = dict(word.split("=") for word in words[1:])
    assert float(told["ttft_s"]) == pytest.approx(0.01 + 3 / 1000, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "say"}),
        ("completions", {"prompt": [115, 97, 121]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "say"}]}),
        ("responses", {"input": "say"}),
    ],
)
async def test_every_endpoint_uses_prefill_workers(
    system: System, path: str, body: dict[str, object], stream: bool
) -> None:
    decode = await system.worker("decode", speaks(TEXT), name="d")
    await system.worker("prefill", hands_over(decode), name="p")
    reply = await system.client.post(f"/v1/{path}", json=body | {"stream": stream})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-baton-route"].startswith("disaggregated prefill=p decode=d")


async def test_requests_go_where_their_prompt_is_known(system: System) -> None:
    decode = await system.worker("decode", speaks(TEXT), name="d")
    for name in ("p1", "p2", "p3"):
        worker = await system.worker("prefill", hands_over(decode), name=name, pace=PACE)
        if name == "p2":
            hashes = block_hashes(MODEL.fingerprint, "", PROMPT.encode(), LAYOUT.block_size)
            worker.send(BlocksStored(tuple(hashes), is_first=True))
    index = system.frontend.registry.index
    await decode.until(lambda: len(index) > 0)
    for _ in range(3):
        reply = await complete(system, prompt=PROMPT)
        assert "prefill=p2" in reply.headers["x-baton-route"]
        assert f"cached=96/{len(PROMPT)}" in reply.headers["x-baton-route"]
    reply = await complete(system, prompt=PROMPT, cache_salt="other")
    assert f"cached=0/{len(PROMPT)}" in reply.headers["x-baton-route"]


async def test_a_short_prompt_stays_where_it_is_decoded(system: System) -> None:
    decode = await system.worker("decode", speaks(TEXT), name="d", pace=PACE)
    await system.worker("prefill", hands_over(decode), name="p", pace=PACE)
    short, long = await complete(system), await complete(system, prompt=PROMPT)
    assert short.headers["x-baton-route"].startswith("colocated prefill=- decode=d")
    assert long.headers["x-baton-route"].startswith("disaggregated prefill=p decode=d")


async def test_every_pair_is_explained_in_the_log(system: System, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "proxy.chooser")
    decode = await system.worker("decode", speaks(TEXT), name="d", pace=PACE)
    await system.worker("prefill", hands_over(decode), name="p", pace=PACE)
    await complete(system)
    (told,) = [record.getMessage() for record in caplog.records if "cost/cost" in record.getMessage()]
    assert "* - > d: cost" in told
    assert "  p > d: cost" in told


async def test_sessions_keep_their_workers(model: ServedModel) -> None:
    config = ProxyConfig(prefill_policy="consistent_hash", decode_policy="round_robin")
    async with system_of(model, config) as system:
        decode = await system.worker("decode", speaks(TEXT), name="d")
        for name in ("p1", "p2", "p3", "p4"):
            await system.worker("prefill", hands_over(decode), name=name)
        for session in ("alice", "bob", "carol"):
            headers = {"X-Session-ID": session}
            body = {"prompt": "say", "max_tokens": 4}
            replies = [
                await system.client.post("/v1/completions", json=body, headers=headers) for _ in range(4)
            ]
            assert len({reply.headers["x-baton-route"].split()[1] for reply in replies}) == 1


async def test_what_would_miss_its_target_is_refused_where_that_is_wanted(model: ServedModel) -> None:
    load = msgspec.structs.replace(LOAD, num_queued_tokens=5000)
    async with system_of(model, ProxyConfig(slo_ttft_s=1.0, slo_admission="refuse")) as system:
        decode = await system.worker("decode", speaks(TEXT), pace=PACE)
        await system.worker("prefill", hands_over(decode), load=load, pace=PACE)
        body = {"prompt": PROMPT, "max_tokens": 4}
        reply = await system.client.post("/v1/completions", json=body)
        assert reply.status_code == 429
        assert "target of 1 s" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"] == "5"
        patient = {"X-Baton-SLO-TTFT": "30"}
        reply = await system.client.post("/v1/completions", json=body, headers=patient)
        assert reply.status_code == 200


async def test_by_default_a_predicted_miss_is_served_all_the_same(model: ServedModel) -> None:
    load = msgspec.structs.replace(LOAD, num_queued_tokens=5000)
    async with system_of(model, ProxyConfig(slo_ttft_s=1.0)) as system:
        decode = await system.worker("decode", speaks(TEXT), pace=PACE)
        await system.worker("prefill", hands_over(decode), load=load, pace=PACE)
        assert (await complete(system, prompt=PROMPT)).status_code == 200


async def test_nothing_is_refused_before_anything_is_measured(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(slo_ttft_s=0.001, slo_admission="refuse")) as system:
        decode = await system.worker("decode", speaks(TEXT))
        await system.worker("prefill", hands_over(decode))
        assert (await complete(system, prompt=PROMPT)).status_code == 200


async def test_a_target_that_is_none_is_a_bad_request(system: System) -> None:
    await system.worker("decode", speaks(TEXT))
    reply = await system.client.post(
        "/v1/completions", json={"prompt": "say"}, headers={"X-Baton-SLO-TTFT": "soon"}
    )
    assert reply.status_code == 400
    assert "X-Baton-SLO-TTFT" in reply.json()["error"]["message"]


async def test_keys_are_told_apart_for_fairness(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(api_key=("one", "two"))) as system:
        decode = await system.worker("decode", speaks(TEXT))
        system.frontend.admission.enter("0", 5)
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "say", "max_tokens": 4}
            assert (
                await system.client.post("/v1/completions", json=body, headers=headers)
            ).status_code == 200
        first, second = decode.generates
        assert second.priority < first.priority
        system.frontend.admission.leave("0", 5)
