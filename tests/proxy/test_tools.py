"""Tools: what the model is told, what it may and must write, and how its calls reach the client."""

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from common.chat_template import ChatTemplate
from common.config import ProxyConfig
from proxy.served_model import ServedModel
from tests.proxy.conftest import TEMPLATE, System, system_of
from tests.proxy.replies import chunks_of, post
from tests.proxy.scripted import answers, speaks
from tests.proxy.test_structured import fits

PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hot?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 20}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "What time it is"}}
TOOLS = [WEATHER, CLOCK]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Brno", "days": 2}}\n</tool_call>'
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}" + TEMPLATE
)


def with_template(model: ServedModel, source: str, **changes: Any) -> ServedModel:
    template = ChatTemplate({"default": source}, {})
    return replace(model, template=template, template_has_tools="tools" in source, **changes)


def prompt_of(worker: Any) -> str:
    return bytes(worker.generates[-1].token_ids).decode()


async def test_a_template_with_tools_gets_them(model: ServedModel) -> None:
    async with system_of(with_template(model, TOOL_TEMPLATE), ProxyConfig()) as system:
        worker = await system.worker("decode", speaks(b"ok"))
        await post(system, PATH, messages=ASK, tools=TOOLS, max_tokens=2)
        assert prompt_of(worker) == "[weather][clock]<user>hot?<assistant>"
        await post(system, PATH, messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=2)
        assert prompt_of(worker) == "<user>hot?<assistant>"


async def test_a_template_without_tools_describes_them_and_what_came_of_them(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    past: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Brno"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "29"},
    ]
    await post(system, PATH, messages=past, tools=TOOLS, max_tokens=2)
    prompt = prompt_of(worker)
    assert prompt.startswith("<system>Be brief.\n\n")
    assert json.dumps(CLOCK) in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Brno"}}\n</tool_call>' in prompt
    assert prompt.endswith("<user><tool_response>\n29\n</tool_response><assistant>")


async def test_a_call_is_told_as_a_call(system: System) -> None:
    await system.worker("decode", answers(f"Let me see.\n{CALL}"))
    reply = await post(system, PATH, messages=ASK, tools=TOOLS)
    (choice,) = openai.types.chat.ChatCompletion.model_validate(reply).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Brno", "days": 2},
    )


async def test_without_tools_the_same_text_is_content(system: System) -> None:
    await system.worker("decode", answers(CALL))
    without: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for options in without:
        reply = await post(system, PATH, messages=ASK, **options)
        assert reply["choices"][0]["message"]["content"] == CALL
        assert reply["choices"][0]["finish_reason"] == "stop"


async def test_calls_are_streamed_with_ids_and_indexes(system: System) -> None:
    text = f'{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'
    await system.worker("decode", answers(text))
    chunks = await chunks_of(system, PATH, messages=ASK, tools=TOOLS)
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            known = calls.setdefault(call["index"], {"arguments": ""})
            if "id" in call:
                assert "id" not in known
                known |= {"id": call["id"], "name": call["function"]["name"]}
            known["arguments"] += call["function"]["arguments"]
    assert [call["name"] for call in calls.values()] == ["weather", "clock"]
    assert [json.loads(call["arguments"]) for call in calls.values()] == [{"city": "Brno", "days": 2}, {}]
    assert len({call["id"] for call in calls.values()}) == 2
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("tool_calls") == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


async def test_the_official_client_collects_a_streamed_call(system: System) -> None:
    await system.worker("decode", answers(CALL))
    client = AsyncOpenAI(base_url=f"{system.client.base_url}/v1", api_key="none")
    tools: Any = TOOLS
    messages: Any = ASK
    async with client, client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    (call,) = final.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Brno", "days": 2},
    )


async def test_every_choice_has_calls_of_its_own(system: System) -> None:
    await system.worker("decode", answers(CALL))
    reply = await post(system, PATH, messages=ASK, tools=TOOLS, n=2)
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in reply["choices"]]
    assert len(set(ids)) == 2
    chunks = await chunks_of(system, PATH, messages=ASK, tools=TOOLS, n=2)
    assert {c["index"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("tool_calls")} == {
        0,
        1,
    }


ONE = '<tool_call>\n{"name": "weather", "arguments": {"city":"Brno"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"days":1}}\n</tool_call>'
LLAMA_ONE = '{"name": "weather", "parameters": {"city":"Brno"}}'
XML_ONE = "<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</parameter>\n</function>\n</tool_call>"
XML_WRONG = XML_ONE.replace("=city", "=town")
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("style", "options", "good", "bad"),
    [
        ("hermes", {"tool_choice": "required"}, (ONE, OTHER, f"{ONE}\n{OTHER}"), (WRONG, "no", "")),
        (
            "hermes",
            {"tool_choice": "required", "parallel_tool_calls": False},
            (ONE, OTHER),
            (f"{ONE}\n{OTHER}", "no"),
        ),
        ("hermes", {"tool_choice": NAMED}, (ONE,), (OTHER, f"{ONE}\n{ONE}")),
        (
            "hermes",
            {"tool_choice": "auto", "response_format": {"type": "json_object"}},
            (ONE, '{"temperature": 3}'),
            (WRONG, "no"),
        ),
        ("llama3_json", {"tool_choice": "required"}, (LLAMA_ONE, f"{LLAMA_ONE}; {LLAMA_ONE}"), (ONE, "no")),
        ("qwen3_coder", {"tool_choice": "required"}, (XML_ONE, f"{XML_ONE}\n{XML_ONE}"), (ONE, XML_WRONG)),
    ],
)
async def test_a_forced_call_becomes_a_grammar_in_the_models_own_style(
    model: ServedModel, style: str, options: dict[str, Any], good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    async with system_of(replace(model, call_style=style), ProxyConfig()) as system:
        worker = await system.worker("decode", answers(good[0]))
        reply = await post(system, PATH, messages=ASK, tools=TOOLS, **options)
        grammar = worker.generates[0].sampling.grammar
        for text in good:
            assert fits(model, grammar, text), text
        for text in bad:
            assert not fits(model, grammar, text), text
        (choice,) = reply["choices"]
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["city"] == "Brno"
        expected = "stop" if options["tool_choice"] is NAMED else "tool_calls"
        assert choice["finish_reason"] == expected


async def test_tools_that_are_only_offered_are_not_enforced(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}
    await post(system, PATH, messages=ASK, tools=[odd], max_tokens=2)
    assert worker.generates[0].sampling.grammar == ""


async def test_a_strict_tool_with_what_cannot_be_enforced_is_refused(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    for strict, status in ((True, 400), (False, 200), (None, 200)):
        odd = {
            "name": "odd",
            "strict": strict,
            "parameters": {"type": "object", "unevaluatedProperties": False},
        }
        body = {"messages": ASK, "tools": [{"type": "function", "function": odd}], "tool_choice": "required"}
        reply = await system.client.post(PATH, json=body | {"max_tokens": 2})
        assert reply.status_code == status, reply.text
        if status == 400:
            assert reply.json()["error"]["param"] == "tools"
            assert worker.generates == []


async def test_a_forced_call_and_another_form_contradict_each_other(system: System) -> None:
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}
    reply = await system.client.post(PATH, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tool_choice"


# Thoughts


async def test_thoughts_are_told_apart_from_the_answer(model: ServedModel) -> None:
    async with system_of(replace(model, has_thoughts=True), ProxyConfig()) as system:
        await system.worker("decode", answers("<think>\nhm\n</think>\n\nYes."))
        reply = await post(system, PATH, messages=ASK)
        assert reply["choices"][0]["message"]["reasoning_content"] == "hm\n"
        assert reply["choices"][0]["message"]["content"] == "Yes."
        chunks = await chunks_of(system, PATH, messages=ASK)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm\n"
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


@pytest.mark.parametrize(
    ("prompt_end", "good", "bad"),
    [
        ("", ("<think>a</think>\n\nyes", "yes"), ("<think>a</think>maybe", "a</think>yes")),
        ("<think>\n", ("a\n</think>\nyes",), ("yes",)),
        ("<think>\n\n</think>\n\n", ("yes",), ("a</think>yes",)),
    ],
)
async def test_a_grammar_holds_for_what_comes_after_the_thoughts(
    model: ServedModel, prompt_end: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    thinking = with_template(model, TEMPLATE + prompt_end, has_thoughts=True)
    async with system_of(thinking, ProxyConfig()) as system:
        worker = await system.worker("decode", speaks(b"ok"))
        await post(system, PATH, messages=ASK, guided_choice=["yes", "no"], max_tokens=2)
        grammar = worker.generates[0].sampling.grammar
        for text in good:
            assert fits(model, grammar, text), text
        for text in bad:
            assert not fits(model, grammar, text), text
