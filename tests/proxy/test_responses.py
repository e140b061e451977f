"""/v1/responses, by the official client's types."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from common.config import ProxyConfig
from common.messages import Generate, WorkerError
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.replies import post
from tests.proxy.scripted import ScriptedWorker, answers, speaks
from tests.proxy.test_structured import fits
from tests.proxy.test_tools import CALL, PARAMETERS

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}


@pytest.fixture
async def client(system: System) -> AsyncIterator[AsyncOpenAI]:
    url = f"{system.client.base_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def prompt_of(worker: ScriptedWorker) -> str:
    return bytes(worker.generates[-1].token_ids).decode()


async def test_text_in_and_text_out(system: System, client: AsyncOpenAI) -> None:
    worker = await system.worker("decode", answers("hi there"))
    response = await client.responses.create(
        model="tiny",
        input="hello",
        instructions="be kind",
        max_output_tokens=50,
        temperature=0.5,
        metadata={"a": "b"},
    )
    assert response.output_text == "hi there"
    assert (response.status, response.object, response.model) == ("completed", "response", "tiny")
    assert response.usage is not None
    assert response.usage.input_tokens == len(worker.generates[0].token_ids)
    assert response.usage.output_tokens == 9
    assert (response.instructions, response.temperature, response.metadata) == ("be kind", 0.5, {"a": "b"})
    assert response.id.startswith("resp_")
    assert prompt_of(worker) == "<system>be kind<user>hello<assistant>"
    assert worker.generates[0].sampling.max_tokens == 50


async def test_what_is_cut_off_is_incomplete(system: System, client: AsyncOpenAI) -> None:
    await system.worker("decode", speaks(b"x" * 100))
    response = await client.responses.create(model="tiny", input="hello", max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"


async def test_a_conversation_is_sent_whole(system: System, client: AsyncOpenAI) -> None:
    worker = await system.worker("decode", answers("ok"))
    past: Any = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "input_text", "text": x} for x in "ab"]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    await client.responses.create(model="tiny", input=past)
    assert prompt_of(worker) == "<system>short<user>ab<assistant>c<user>d<assistant>"


async def test_calls_and_what_came_of_them(system: System, client: AsyncOpenAI) -> None:
    worker = await system.worker("decode", answers(f"Let me see.\n{CALL}"))
    response = await client.responses.create(model="tiny", input="hot?", tools=[TOOL])
    message, call = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Brno", "days": 2})
    past: Any = [
        {"role": "user", "content": "hot?"},
        *[item.to_dict() for item in response.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "29"},
    ]
    await client.responses.create(model="tiny", input=past, tools=[TOOL])
    assert CALL in prompt_of(worker)
    assert "29" in prompt_of(worker)


async def test_text_of_a_format_is_enforced(system: System, client: AsyncOpenAI) -> None:
    worker = await system.worker("decode", answers('{"city": "x"}'))
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": PARAMETERS, "strict": True}}
    await client.responses.create(model="tiny", input="where?", text=form)
    assert fits(system.frontend.model, worker.generates[0].sampling.grammar, '{"city": "x"}')
    assert not fits(system.frontend.model, worker.generates[0].sampling.grammar, "{}")


async def collected(client: AsyncOpenAI, **options: Any) -> tuple[list[Any], Response]:
    """All events of a stream, checked against each other, and the response at its end."""
    events: list[Any] = [
        event async for event in await client.responses.create(model="tiny", stream=True, **options)
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1].response
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == list(range(len(response.output)))
    assert [event.item for event in done] == response.output
    for item in response.output:
        deltas = "".join(
            event.delta for event in events if event.type.endswith(".delta") and event.item_id == item.id
        )
        assert deltas == text_of(item)
    return events, response


def text_of(item: Any) -> str:
    return str(item.arguments if isinstance(item, ResponseFunctionToolCall) else item.content[0].text)


async def test_a_stream_builds_the_same_response(system: System, client: AsyncOpenAI) -> None:
    await system.worker("decode", answers("čau 🙂"))
    events, response = await collected(client, input="hello")
    assert events[-1].type == "response.completed"
    assert response.output_text == "čau 🙂"
    whole = await client.responses.create(model="tiny", input="hello")
    assert response.usage == whole.usage
    assert [event.type for event in events[2:4]] == [
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.type for event in events[-4:-1]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip


async def test_a_stream_of_thoughts_text_and_calls_has_an_item_for_each(model: ServedModel) -> None:
    async with system_of(replace(model, has_thoughts=True), ProxyConfig()) as system:
        await system.worker("decode", answers(f"<think>hm</think>Let me see.\n{CALL}\n{CALL}"))
        url = f"{system.client.base_url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            events, response = await collected(client, input="hot?", tools=[TOOL])
            kinds = [type(item) for item in response.output]
            call = ResponseFunctionToolCall
            assert kinds == [ResponseReasoningItem, ResponseOutputMessage, call, call]
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == 2
            whole = await client.responses.create(model="tiny", input="hot?", tools=[TOOL])
            assert [text_of(item) for item in whole.output] == [text_of(item) for item in response.output]
    assert [event.type for event in events].count("response.function_call_arguments.done") == 2


async def test_a_stream_that_is_cut_off_ends_as_incomplete(system: System, client: AsyncOpenAI) -> None:
    await system.worker("decode", speaks(b"x" * 100))
    events, response = await collected(client, input="hello", max_output_tokens=5)
    assert events[-1].type == "response.incomplete"
    assert response.status == "incomplete"


async def test_a_failure_in_a_stream_is_an_event(system: System, client: AsyncOpenAI) -> None:
    async def breaks(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, tuple(b"so far"))
        worker.fail(generate, WorkerError("invalid", "no further"))

    await system.worker("decode", breaks)
    events: list[Any] = [e async for e in await client.responses.create(model="tiny", input="x", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "no further"


async def test_logprobs_come_when_they_are_included(system: System, client: AsyncOpenAI) -> None:
    await system.worker("decode", speaks(b"hey"))
    response = await client.responses.create(
        model="tiny", input="x", max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2
    )
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    part: Any = message.content[0]
    assert [entry.token for entry in part.logprobs] == ["h", "e", "y"]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"content": "no role"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input",
        ),
        ({"input": "x" * 5000}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 7}, "temperature"),
    ],
)
async def test_what_cannot_be_done_is_refused(system: System, options: dict[str, Any], param: str) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    reply = await system.client.post(PATH, json={"input": "x"} | options)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert worker.generates == []


async def test_what_has_no_effect_is_named_in_a_header(system: System) -> None:
    await system.worker("decode", answers("ok"))
    body = {"input": "x", "store": True, "reasoning": {"effort": "low"}, "service_tier": "auto"}
    reply = await system.client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-baton-ignored"].split(", ")) == {"store", "reasoning", "service_tier"}
    assert (await post(system, PATH, input="x"))["store"] is False


async def test_the_official_client_refuses_by_type(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="other", input="x")
