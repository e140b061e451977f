"""Requests and workers over real sockets: hand-over, failure, retry, abort."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from common.config import ProxyConfig
from common.messages import Generate, Role, WorkerError
from proxy import attempt as attempt_module
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.replies import chunks_of
from tests.proxy.scripted import LAYOUT, LOAD, WAIT_S, Script, ScriptedWorker, speaks

TEXT = b"the quick brown fox jumps over the lazy dog"


async def complete(system: System, **body: object) -> httpx.Response:
    return await system.client.post("/v1/completions", json={"prompt": "say", "max_tokens": len(TEXT)} | body)


async def text_of(system: System, **body: object) -> str:
    reply = await complete(system, **body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def hands_over(to: ScriptedWorker, first: bytes = TEXT) -> Script:
    """A prefill worker: says the first token; the decode worker goes on from there."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        done = len(generate.token_ids) - generate.num_prompt_tokens
        last = generate.sampling.max_tokens == done + 1
        worker.say(generate, done, (first[done],), "length" if last else None, num_cached_tokens=2)
        if not last:
            to.take_over(generate)

    return script


def fails(code: str, message: str = "so it is") -> Script:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.fail(generate, WorkerError(code, message))  # type: ignore[arg-type]

    return script


async def silence(worker: ScriptedWorker, generate: Generate) -> None:
    await asyncio.Event().wait()


def then_silence(text: bytes) -> Script:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, tuple(text))
        await asyncio.Event().wait()

    return script


async def pair(system: System, text: bytes = TEXT) -> tuple[ScriptedWorker, ScriptedWorker]:
    decode = await system.worker("decode", speaks(text))
    return await system.worker("prefill", hands_over(decode)), decode


async def test_a_pair_serves_a_request(system: System) -> None:
    prefill, decode = await pair(system)
    assert await text_of(system) == TEXT.decode()
    (generate,) = prefill.generates
    assert generate.decode is not None
    assert generate.decode.incarnation == decode.incarnation
    assert generate.decode.address == decode.status.address
    assert (generate.attempt, generate.token_ids) == (0, tuple(b"say"))
    assert generate.proxy == system.frontend.dispatcher.incarnation
    assert prefill.aborts == decode.aborts == []


async def test_a_request_may_end_with_the_first_token(system: System) -> None:
    _, decode = await pair(system)
    assert await text_of(system, max_tokens=1) == "t"
    assert decode.num_taken_over == 0


async def test_the_decode_worker_may_be_heard_before_the_prefill_worker(system: System) -> None:
    decode = await system.worker("decode", speaks(TEXT))

    async def late(worker: ScriptedWorker, generate: Generate) -> None:
        decode.take_over(generate)
        await decode.until(lambda: decode.num_said >= 5)
        worker.say(generate, 0, (TEXT[0],))

    await system.worker("prefill", late)
    assert await text_of(system) == TEXT.decode()


async def test_a_prefill_worker_that_dies_costs_an_attempt_and_no_reply(system: System) -> None:
    decode = await system.worker("decode", speaks(TEXT))
    prefill = await system.worker("prefill", silence)
    asking = asyncio.create_task(text_of(system))
    await prefill.until(lambda: bool(prefill.generates))
    prefill.close()
    assert await asyncio.wait_for(asking, WAIT_S) == TEXT.decode()
    assert decode.generates[0].attempt == 1
    assert decode.generates[0].decode is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_worker_that_dies_in_mid_stream_is_not_seen_by_the_client(
    system: System, stream: bool
) -> None:
    doomed = await system.worker("decode", then_silence(TEXT[:7]))
    asking = asyncio.create_task(complete(system, stream=stream))
    await doomed.until(lambda: doomed.num_said == 1)
    other = await system.worker("decode", speaks(TEXT))
    doomed.close()
    reply = await asyncio.wait_for(asking, WAIT_S)
    (generate,) = other.generates
    assert generate.attempt == 1
    assert generate.num_prompt_tokens == 3
    assert generate.token_ids[:3] == tuple(b"say")
    assert generate.token_ids[3:] == tuple(TEXT[: len(generate.token_ids) - 3])
    assert generate.sampling == doomed.generates[0].sampling
    if stream:
        text = "".join(
            msgspec.json.decode(event[6:])["choices"][0]["text"] for event in reply.text.split("\n\n")[:-2]
        )
    else:
        text = reply.json()["choices"][0]["text"]
    assert text == TEXT.decode()


async def test_a_dead_pair_is_waited_for(system: System) -> None:
    doomed = await system.worker("decode", then_silence(TEXT[:7]))
    asking = asyncio.create_task(text_of(system))
    await doomed.until(lambda: doomed.num_said == 1)
    doomed.close()
    await until_workers(system, 0)
    await system.worker("decode", speaks(TEXT))
    assert await asyncio.wait_for(asking, WAIT_S) == TEXT.decode()


async def until_workers(system: System, number: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(system.frontend.registry.ready()) != number:
            await asyncio.sleep(0.01)


async def test_a_silent_worker_loses_its_requests_and_is_welcomed_back(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(dead_after_s=0.6)) as system:
        sleeper = await system.worker("decode", silence)
        asking = asyncio.create_task(text_of(system))
        await sleeper.until(lambda: bool(sleeper.generates))
        sleeper.beats = False
        other = await system.worker("decode", speaks(TEXT))
        assert await asyncio.wait_for(asking, WAIT_S) == TEXT.decode()
        assert other.generates[0].attempt == 1
        sleeper.beats = True
        await sleeper.until(lambda: sleeper.num_lost == 1)
        await until_workers(system, 2)


async def test_a_worker_in_a_new_session_has_its_old_requests_failed_over(system: System) -> None:
    worker = await system.worker("decode", then_silence(TEXT[:3]))
    asking = asyncio.create_task(text_of(system))
    await worker.until(lambda: worker.num_said == 1)
    worker.script = speaks(TEXT)
    worker.break_connection()
    assert await asyncio.wait_for(asking, WAIT_S) == TEXT.decode()
    assert [generate.attempt for generate in worker.generates] == [0, 1]


async def test_messages_of_an_earlier_attempt_are_void_and_answered_with_abort(system: System) -> None:
    async def gives_up(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, (TEXT[0],))
        worker.fail(generate, WorkerError("internal", "oops"))

    stubborn = await system.worker("decode", gives_up)
    other = await system.worker("decode", speaks(TEXT))
    assert await text_of(system) == TEXT.decode()
    (first,) = stubborn.generates
    assert other.generates
    num_aborts = len(stubborn.aborts)
    stubborn.say(first, 1, tuple(b"XXXX"))
    await stubborn.until(lambda: len(stubborn.aborts) > num_aborts)
    assert (stubborn.aborts[-1].request_id, stubborn.aborts[-1].attempt) == (first.request_id, 0)


async def test_a_late_error_of_the_prefill_worker_changes_nothing(system: System) -> None:
    registry, complained = system.frontend.registry, asyncio.Event()

    async def waits(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, (TEXT[0],))
        await complained.wait()
        worker.say(generate, 1, tuple(TEXT[1:]), "length")

    decode = await system.worker("decode", waits)

    async def complains(worker: ScriptedWorker, generate: Generate) -> None:
        decode.take_over(generate)
        # The prompt counts as computed once the decode worker is heard.
        await decode.until(lambda: not any(w.charges for w in registry if w.role == "prefill"))
        worker.fail(generate, WorkerError("peer_lost", "did not hear Landed"))
        complained.set()

    prefill = await system.worker("prefill", complains)
    assert await text_of(system) == TEXT.decode()
    assert len(prefill.generates) == 1
    assert decode.aborts == []


async def test_a_failing_pair_is_left_out_when_there_is_another(system: System) -> None:
    bad = await system.worker("decode", fails("internal"))
    good = await system.worker("decode", speaks(TEXT))
    for _ in range(2):
        assert await text_of(system) == TEXT.decode()
    assert len(bad.generates) == 1 or len(bad.generates) == 2
    assert len(good.generates) == 2


async def test_a_worker_that_keeps_failing_is_avoided(system: System) -> None:
    bad = await system.worker("decode", fails("internal"))
    await system.worker("decode", speaks(TEXT))
    for _ in range(12):
        assert await text_of(system) == TEXT.decode()
    assert len(bad.generates) <= 4


@pytest.mark.parametrize(
    ("code", "status", "attempts"),
    [
        ("invalid", 400, 1),
        ("internal", 500, 4),
        ("peer_lost", 503, 4),
        ("overloaded", 429, 1),
        ("deadline", 504, 1),
    ],
)
async def test_errors_of_workers_become_the_right_status(
    system: System, code: str, status: int, attempts: int
) -> None:
    worker = await system.worker("decode", fails(code, "worker says so"))
    reply = await complete(system)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    assert len(worker.generates) == attempts
    assert [generate.attempt for generate in worker.generates] == list(range(attempts))


async def test_an_overloaded_prefill_worker_is_not_replaced_by_decode_workers(system: System) -> None:
    decode = await system.worker("decode", speaks(TEXT))
    prefill = await system.worker("prefill", fails("overloaded"))
    assert (await complete(system)).status_code == 429
    assert decode.generates == []
    assert len(prefill.generates) == 1


async def test_a_draining_worker_is_replaced_at_once(system: System) -> None:
    leaving = await system.worker("decode", fails("draining"))
    await system.worker("decode", speaks(TEXT))
    for _ in range(4):
        assert await text_of(system) == TEXT.decode()
    assert len(leaving.generates) <= 1


async def test_a_decode_worker_that_drains_is_not_held_against_the_prefill_worker(system: System) -> None:
    """The prefill worker passes on what the decode worker has said to its offer."""
    refused: set[str] = set()

    async def passes_on(worker: ScriptedWorker, generate: Generate) -> None:
        assert generate.decode is not None
        if not refused:
            refused.add(generate.decode.incarnation)
        if generate.decode.incarnation in refused:
            error = WorkerError("draining", "decode worker is draining", origin="decode")
            worker.say(generate, 0, (), "error", error=error)
        else:
            worker.say(generate, 0, tuple(TEXT), "length")

    prefill = await system.worker("prefill", passes_on)
    for _ in range(2):
        await system.worker("decode", speaks(TEXT))
    for _ in range(4):
        assert await text_of(system) == TEXT.decode()
    assert len(prefill.generates) == 5


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "say"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say"}]}),
    ],
)
async def test_each_chunk_of_a_stream_names_its_worker_when_asked_to(
    system: System, path: str, prompt: dict[str, object]
) -> None:
    prefill, decode = await pair(system)

    async def workers(**body: object) -> list[str]:
        chunks = await chunks_of(system, path, **(prompt | body))
        return [choice["worker"] for chunk in chunks for choice in chunk["choices"] if "worker" in choice]

    assert await workers(max_tokens=1, return_workers=True) == [prefill.status.name]
    names = await workers(max_tokens=4, return_workers=True)
    assert names[-1] == decode.status.name and set(names) <= {prefill.status.name, decode.status.name}
    assert await workers(max_tokens=4) == []


async def test_a_request_that_cannot_be_handed_over_is_served_by_a_decode_worker_alone(
    system: System,
) -> None:
    prefill = await system.worker("prefill", fails("peer_lost"))
    other = await system.worker("prefill", fails("peer_lost"))
    decode = await system.worker("decode", speaks(TEXT))
    assert await text_of(system) == TEXT.decode()
    assert len(prefill.generates) + len(other.generates) == 2
    assert [generate.attempt for generate in decode.generates] == [2]


async def test_a_damaged_message_fails_over_what_its_worker_had(system: System) -> None:
    async def garbles(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, tuple(TEXT[:2]))
        worker.script = speaks(TEXT)
        socket = worker._channel._socket
        assert socket is not None
        await socket.send_multipart([b"\x81\xa4type\xa7Outputs", bytes(8)])
        await asyncio.Event().wait()

    worker = await system.worker("decode", garbles)
    assert await text_of(system) == TEXT.decode()
    assert worker.num_lost == 1
    assert len(worker.generates) == 2


async def test_a_decode_worker_that_skips_tokens_is_not_believed(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "GAP_TIMEOUT_S", 0.1)

    async def skips(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, tuple(TEXT[:2]))
        worker.say(generate, 5, tuple(TEXT[5:]), "length")
        worker.script = speaks(TEXT)
        await asyncio.Event().wait()

    worker = await system.worker("decode", skips)
    assert await text_of(system) == TEXT.decode()
    assert len(worker.generates[1].token_ids) == 3 + 2


async def test_requests_without_workers_are_refused_at_once(system: System) -> None:
    reply = await complete(system)
    assert reply.status_code == 503
    assert "no decode worker" in reply.json()["error"]["message"]
    assert reply.headers["retry-after"]


async def test_a_request_waits_for_a_worker_that_has_just_gone(system: System) -> None:
    first = await system.worker("decode", silence)
    first.close()
    asking = asyncio.create_task(complete(system))
    await first.until(lambda: not system.frontend.registry.serves)
    assert not asking.done()
    await system.worker("decode", speaks(TEXT))
    assert (await asking).json()["choices"][0]["text"] == TEXT.decode()


async def test_a_request_waits_in_vain_for_a_bounded_time(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(worker_wait_s=0.3)) as system:
        worker = await system.worker("decode", silence)
        worker.close()
        await worker.until(lambda: not system.frontend.registry.serves)
        assert (await complete(system)).status_code == 503


async def test_a_prefill_worker_alone_serves_nobody(system: System) -> None:
    prefill = await system.worker("prefill", silence)
    assert (await complete(system)).status_code == 503
    assert prefill.generates == []


async def test_prefill_workers_come_back_into_use(system: System) -> None:
    prefill, decode = await pair(system)
    prefill.close()
    await until_workers(system, 1)
    assert await text_of(system) == TEXT.decode()
    again = await system.worker("prefill", hands_over(decode))
    assert await text_of(system) == TEXT.decode()
    assert len(again.generates) == 1
    metrics = (await system.client.get("/metrics")).text
    assert 'baton_dispatched_total{path="fallback"} 1.0' in metrics
    assert 'baton_dispatched_total{path="disaggregated"} 1.0' in metrics


async def test_a_burst_is_spread_before_any_worker_reports(system: System) -> None:
    workers = [await system.worker("decode", silence) for _ in range(3)]
    asking = [asyncio.create_task(complete(system)) for _ in range(9)]
    await workers[0].until(lambda: [len(worker.generates) for worker in workers] == [3, 3, 3])
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


async def test_one_after_another_goes_round(system: System) -> None:
    decodes = [await system.worker("decode", speaks(TEXT)) for _ in range(2)]
    prefills = [await system.worker("prefill", hands_over_to_any(decodes)) for _ in range(2)]
    for _ in range(8):
        assert await text_of(system) == TEXT.decode()
    assert [len(worker.generates) for worker in prefills] == [4, 4]
    assert [worker.num_taken_over for worker in decodes] == [4, 4]


def hands_over_to_any(decodes: list[ScriptedWorker]) -> Script:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        assert generate.decode is not None
        (to,) = [decode for decode in decodes if decode.incarnation == generate.decode.incarnation]
        await hands_over(to)(worker, generate)

    return script


async def test_an_incompatible_worker_is_refused_with_the_field_named(system: System) -> None:
    await system.worker("decode", speaks(TEXT))
    layout = msgspec.structs.replace(LAYOUT, block_size=32)
    odd = await system.start_worker("prefill", silence, layout=layout)
    await odd.until(lambda: bool(odd.refusals))
    assert "block_size: 16 here, 32 there" in odd.refusals[0]
    assert await text_of(system) == TEXT.decode()
    assert odd.generates == []
    shown = (await system.client.get("/workers")).json()["workers"]
    assert [worker["reason"] for worker in shown if worker["state"] == "refused"] == odd.refusals


async def test_what_can_never_fit_is_refused_before_any_worker_hears_of_it(system: System) -> None:
    worker = await system.worker("decode", silence, max_sequence_tokens=64)
    reply = await complete(system, prompt="x" * 60, max_tokens=5)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "64" in error["message"]
    assert "65" in error["message"]
    assert worker.generates == []


async def test_the_deadline_is_kept_and_told_to_the_worker(system: System) -> None:
    worker = await system.worker("decode", silence)
    reply = await complete(system, timeout_s=0.3)
    assert reply.status_code == 504
    assert 0 < worker.generates[0].deadline_s <= 0.3
    await worker.until(lambda: len(worker.aborts) == 1)


@contextlib.asynccontextmanager
async def leaving(system: System, stream: bool) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    task = asyncio.create_task(complete(system, stream=stream))
    yield task
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [b"", TEXT[:3]])
async def test_a_client_that_leaves_has_its_request_aborted_on_both_workers(
    system: System, stream: bool, text: bytes
) -> None:
    decode = await system.worker("decode", then_silence(text) if text else silence)

    async def prefills(worker: ScriptedWorker, generate: Generate) -> None:
        if text:
            decode.take_over(generate)
        await asyncio.Event().wait()

    prefill = await system.worker("prefill", prefills)
    async with leaving(system, stream):
        await prefill.until(lambda: bool(prefill.generates))
        if text:
            await decode.until(lambda: decode.num_said == 1)
    await prefill.until(lambda: len(prefill.aborts) == 1)
    await decode.until(lambda: len(decode.aborts) == 1)
    assert prefill.aborts[0].request_id == prefill.generates[0].request_id
    await system.settled()


async def test_a_stop_string_ends_the_request_on_the_workers(system: System) -> None:
    worker = await system.worker("decode", then_silence(b"one two STOP three"))
    reply = await complete(system, stop=["STOP"], max_tokens=100)
    choice = reply.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two ", "stop")
    assert reply.json()["usage"]["completion_tokens"] == len("one two STOP")
    await worker.until(lambda: len(worker.aborts) == 1)


async def test_an_error_after_the_first_chunk_ends_the_stream_with_an_error_event(system: System) -> None:
    async def breaks(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, tuple(b"some"))
        worker.fail(generate, WorkerError("invalid", "cannot go on"))

    await system.worker("decode", breaks)
    reply = await complete(system, stream=True)
    assert reply.status_code == 200
    events = reply.text.split("\n\n")
    assert events[-1] == ""
    error = msgspec.json.decode(events[-2][len("data: ") :])["error"]
    assert error["message"] == "cannot go on"
    assert "[DONE]" not in reply.text


async def test_many_clients_leaving_at_any_moment_leave_nothing_behind(system: System) -> None:
    await pair(system, TEXT)

    async def visit(index: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.002 * index):
                await complete(system, stream=index % 2 == 0)

    await asyncio.gather(*(visit(index) for index in range(60)))
    await system.settled()
    assert await text_of(system) == TEXT.decode()


async def test_more_requests_than_allowed_are_refused_at_once(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(max_queued_requests=3)) as system:
        worker = await system.worker("decode", silence)
        asking = [asyncio.create_task(complete(system)) for _ in range(3)]
        await worker.until(lambda: len(worker.generates) == 3)
        reply = await complete(system)
        assert reply.status_code == 429
        assert reply.headers["retry-after"]
        assert reply.json()["error"]["code"] == "overloaded"
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await system.settled()
        worker.script = speaks(TEXT)
        assert await text_of(system) == TEXT.decode()


async def test_load_reported_by_workers_decides(system: System) -> None:
    busy = msgspec.structs.replace(LOAD, num_running=50)
    loaded = await system.worker("decode", speaks(TEXT), load=busy)
    idle = await system.worker("decode", speaks(TEXT))
    for _ in range(5):
        assert await text_of(system) == TEXT.decode()
    assert (len(loaded.generates), len(idle.generates)) == (0, 5)


async def test_without_fallback_requests_wait_for_no_prefill_worker(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(prefill_fallback=False, worker_wait_s=0.3)) as system:
        prefill, decode = await pair(system)
        assert await text_of(system) == TEXT.decode()
        prefill.close()
        await until_workers(system, 1)
        reply = await complete(system)
        assert reply.status_code == 503
        assert "no prefill worker" in reply.json()["error"]["message"]
        assert decode.generates == []
        assert (await system.client.get("/ready")).json()["missing"] == ["prefill"]
        assert (await system.client.get("/ready")).status_code == 503
        small = await system.worker("prefill", hands_over(decode), max_sequence_tokens=32)
        reply = await complete(system, prompt="x" * 40)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert small.generates == []


async def test_a_prompt_too_long_for_prefill_workers_goes_to_a_decode_worker(system: System) -> None:
    decode = await system.worker("decode", speaks(TEXT))
    small = await system.worker("prefill", hands_over(decode), max_sequence_tokens=32)
    assert await text_of(system, prompt="x" * 40) == TEXT.decode()
    assert await text_of(system, prompt="x") == TEXT.decode()
    assert [len(generate.token_ids) for generate in small.generates] == [1]


async def test_under_any_sequence_of_losses_a_reply_is_right_or_an_error(system: System) -> None:
    """Workers die, come back and lose their connections while requests run."""
    chance = random.Random(7)

    async def add(role: Role) -> ScriptedWorker:
        script = speaks(TEXT) if role == "decode" else hands_over_to_any(decodes)
        return await system.start_worker(role, script)

    decodes: list[ScriptedWorker] = []
    decodes += [await add("decode") for _ in range(2)]
    prefills = [await add("prefill") for _ in range(2)]
    await until_workers(system, 4)

    async def break_things() -> None:
        for _ in range(25):
            group: list[ScriptedWorker] = chance.choice([decodes, prefills])
            worker = chance.choice(group)
            if chance.random() < 0.5:
                worker.break_connection()
            else:
                worker.close()
                group[group.index(worker)] = await add(worker.status.role)
            await asyncio.sleep(chance.uniform(0, 0.1))

    async def ask() -> int:
        reply = await complete(system, stream=chance.random() < 0.5)
        if reply.status_code != 200:
            return 0
        if "choices" in reply.text and reply.headers["content-type"] == "application/json":
            assert reply.json()["choices"][0]["text"] == TEXT.decode()
            return 1
        events = [msgspec.json.decode(event[6:]) for event in reply.text.split("\n\n")[:-2]]
        text = "".join(event["choices"][0]["text"] for event in events if "choices" in event)
        assert TEXT.decode().startswith(text)
        assert ("[DONE]" in reply.text) == (text == TEXT.decode())
        return int(text == TEXT.decode())

    async def ask_on() -> int:
        return sum([await ask() for _ in range(8)])

    breaking = asyncio.create_task(break_things())
    num_right = sum(await asyncio.gather(*(ask_on() for _ in range(8))))
    await breaking
    await system.settled()
    assert num_right > 32
