"""The API as a client meets it: a prefill and a decode worker, the default model, the official client."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.system.server import Server

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 1, "maximum": 9999999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
    "additionalProperties": False,
}}}  # fmt: skip
ASK: Any = [{"role": "user", "content": "Tell me about Paris."}]


@pytest.fixture
def client(system: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def hand_overs(system: Server) -> float:
    text = httpx.get(f"{system.url}/metrics", trust_env=False).text
    return sum(
        float(n) for n in re.findall(r"^baton_dispatched_total\{path=\"disaggregated\"\} (\S+)", text, re.M)
    )


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema_comes_back(
    client: OpenAI, system: Server, temperature: float, stream: bool
) -> None:
    before = hand_overs(system)
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    asked: dict[str, Any] = {
        "model": "default", "messages": ASK, "response_format": form, "temperature": temperature, "seed": 3,
        "max_tokens": 200,
    }  # fmt: skip
    if stream:
        chunks = client.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content or ""
    reply = json.loads(text)
    assert set(reply) == {"name", "population"}
    assert reply["population"] >= 1
    assert hand_overs(system) == before + 1


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": r"[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
        ({"guided_choice": ["north", "south", "east"]}, "north|south|east"),
        ({"structured_outputs": {"grammar": 'start: "x" "=" /[0-9]{1,6}/ ";"'}}, "x=[0-9]+;"),
    ],
)
def test_what_is_guided_is_followed(client: OpenAI, extra: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        reply = client.completions.create(
            model="default", prompt="The answer is", max_tokens=60, seed=seed, extra_body=extra
        )
        assert reply.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, reply.choices[0].text)


def test_a_required_call_is_made(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="default", messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=1
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    again: Any = [
        *ASK,
        choice.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    final = client.chat.completions.create(model="default", messages=again, tools=[TOOL], max_tokens=8)
    assert final.choices[0].message.content


def test_what_is_refused_is_refused_by_type(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        client.completions.create(
            model="default", prompt="x", extra_body={"guided_json": {"unevaluatedProperties": False}}
        )


def test_logprobs_of_a_prompt_are_those_of_the_same_text_as_output(client: OpenAI) -> None:
    prompt = "The capital of France is"
    ask: Any = {"model": "default", "temperature": 0, "logprobs": 0}
    output = client.completions.create(**ask, prompt=prompt, max_tokens=6)
    whole = prompt + output.choices[0].text
    echoed = client.completions.create(**ask, prompt=whole, max_tokens=1, echo=True)
    written, read = output.choices[0].logprobs, echoed.choices[0].logprobs
    assert written is not None
    assert read is not None
    assert written.tokens == (read.tokens or [])[-7:-1]
    assert (read.token_logprobs or [])[-7:-1] == pytest.approx(written.token_logprobs, abs=1e-3)
