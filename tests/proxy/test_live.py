import asyncio
import json
from typing import Any

import msgspec

from common.messages import Generate
from proxy.record import Record
from proxy.slowest import Slowest
from tests.proxy.conftest import System
from tests.proxy.scripted import LOAD, WAIT_S, Script, ScriptedWorker, speaks

BODY = {"prompt": "say", "max_tokens": 5}
WINDOW = {
    "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "e2e_p50_s", "e2e_p99_s", "requests_per_s",
    "good_per_s", "errors_per_s", "output_tokens_per_s", "prompt_tokens_per_s",
}  # fmt: skip


def hands_over_to(decode: list[ScriptedWorker]) -> Script:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(
            generate, 0, (104,), timings={"queue_s": 0.0, "prefill_s": 0.001, "prefill_kernel_s": 0.0005}
        )
        decode[0].take_over(generate)

    return script


async def continues(worker: ScriptedWorker, generate: Generate) -> None:
    worker.say(generate, 0, (104,))
    worker.say(generate, 1, (101, 108), "length", timings={"decode_s": 0.0, "decode_kernel_s": 0.0})


async def pair(system: System) -> tuple[ScriptedWorker, ScriptedWorker]:
    """Prefill and decode."""
    decode: list[ScriptedWorker] = []
    prefill = await system.worker("prefill", hands_over_to(decode))
    decode.append(await system.worker("decode", continues))
    return prefill, decode[0]


async def look_until(system: System, condition: Any) -> dict[str, Any]:
    """The first snapshot that fulfils it."""
    async with asyncio.timeout(WAIT_S):
        while not condition(snapshot := system.frontend.observer.live.snapshot()):
            await asyncio.sleep(0.02)
    json.loads(json.dumps(snapshot))
    return snapshot


async def test_the_picture_shows_workers_links_and_requests(system: System) -> None:
    prefill, decode = await pair(system)
    reply = await system.client.post("/v1/completions", json=BODY)
    assert reply.status_code == 200
    snapshot = await look_until(system, lambda s: len(s["workers"]) == 2 and s["recent"])
    assert snapshot["ready"] and snapshot["model"] == "tiny" and snapshot["in_flight"] == 0
    assert [w["name"] for w in snapshot["workers"]] == [prefill.status.name, decode.status.name]
    first = snapshot["workers"][0]
    assert first["state"] == "ready" and first["load"] == msgspec.to_builtins(LOAD) and first["kv_use"] == 0
    record = snapshot["recent"][0]
    assert record["outcome"] == "length" and record["output_tokens"] == 3 and record["good"]
    path = {"prefill": prefill.status.name, "decode": decode.status.name, "path": "disaggregated"}
    assert record["routes"] == [path | {"error": None}]
    names = [segment["name"] for segment in record["segments"]]
    assert names == ["route", "queue", "prefill", "transfer", "wait", "decode"]
    assert abs(sum(record["split"].values()) - record["total_s"]) < 1e-9
    assert all(window.keys() == WINDOW for window in snapshot["windows"].values())
    window = snapshot["windows"]["60"]
    assert window["ttft_p50_s"] > 0 and window["requests_per_s"] > 0 and window["good_per_s"] > 0


async def test_rates_come_from_two_reports(system: System) -> None:
    prefill, decode = await pair(system)
    link = f"transfer_link_bytes_total:{decode.incarnation}"
    prefill.status = msgspec.structs.replace(prefill.status, counters={link: 1000.0, "steps_total": 5.0})
    await look_until(system, lambda s: s["links"])
    prefill.status = msgspec.structs.replace(prefill.status, counters={link: 5000.0, "steps_total": 9.0})
    snapshot = await look_until(system, lambda s: s["links"] and (s["links"][0]["bytes_per_s"] or 0) > 0)
    assert snapshot["links"][0]["prefill"] == prefill.status.name
    assert snapshot["links"][0]["decode"] == decode.status.name
    assert snapshot["workers"][0]["rates"]["steps"] > 0
    assert snapshot["workers"][0]["rates"]["sent_bytes"] is None


async def test_a_lost_worker_stays_in_the_picture_until_one_of_its_name_is_back(system: System) -> None:
    worker = await system.worker("decode", name="decode-0")
    await look_until(system, lambda s: [w["state"] for w in s["workers"]] == ["ready"])
    worker.close()
    await look_until(system, lambda s: [w["state"] for w in s["workers"]] in (["lost"], ["silent"]))
    again = await system.worker("decode", name="decode-0")
    await look_until(system, lambda s: [w["id"] for w in s["workers"]] == [again.incarnation])


async def test_requests_that_fail_or_are_left_are_told_as_such(system: System) -> None:
    worker = await system.worker("decode", speaks(b""))
    reading = asyncio.create_task(system.client.post("/v1/completions", json=BODY))
    await worker.until(lambda: len(worker.generates) == 1)
    reading.cancel()
    await system.settled()
    reply = await system.client.post("/v1/completions", json=BODY | {"timeout_s": 0.2})
    assert reply.status_code == 504
    snapshot = await look_until(system, lambda s: len(s["recent"]) == 2)
    assert [(r["outcome"], r["error"]) for r in snapshot["recent"]] == [
        ("error", "deadline"),
        ("abort", None),
    ]
    assert not any(record["good"] for record in snapshot["recent"])
    assert snapshot["windows"]["60"]["errors_per_s"] > 0


async def test_the_slowest_requests_are_kept(system: System) -> None:
    await system.worker("decode", speaks(b"hello"))
    for _ in range(3):
        await system.client.post("/v1/completions", json=BODY)
    slowest = (await system.client.get("/debug/requests")).json()["slowest"]
    times = [record["total_s"] for record in slowest]
    assert len(times) == 3 and times == sorted(times, reverse=True)
    assert slowest[0]["routes"][0]["path"] == "colocated"
    assert "say" not in json.dumps(slowest)


def test_only_the_slowest_are_kept() -> None:
    record = Record("r", "", 0.0, "stop", None, 1, 0, 1, 0.1, None, 1.0, True, (), (), {})
    slowest = Slowest(num_kept=2)
    for seconds in (3.0, 1.0, 2.0):
        slowest.note(record._replace(total_s=seconds))
    assert [kept["total_s"] for kept in slowest.to_json()] == [3.0, 2.0]


def is_idle(system: System) -> bool:
    return system.frontend.observer.live.is_idle


async def test_idle_is_said_of_a_system_without_requests_only(system: System) -> None:
    assert is_idle(system)
    decode: list[ScriptedWorker] = []
    release = asyncio.Event()

    async def waits(worker: ScriptedWorker, generate: Generate) -> None:
        await release.wait()
        await continues(worker, generate)

    await system.worker("prefill", hands_over_to(decode))
    decode.append(await system.worker("decode", waits))
    request = asyncio.create_task(system.client.post("/v1/completions", json=BODY))
    await look_until(system, lambda s: s["in_flight"] == 1)
    assert not is_idle(system)
    release.set()
    assert (await request).status_code == 200
    await look_until(system, lambda s: s["recent"])
    assert not is_idle(system)
