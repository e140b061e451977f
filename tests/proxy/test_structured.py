"""Whatever a client asks the output to be like reaches the workers as one grammar, or is refused."""

import json
from typing import Any

import pytest

from common.messages import Generate, WorkerError
from proxy.served_model import ServedModel
from proxy.structured import MAX_OPTIONAL_PROPERTIES, count_optional
from tests.proxy.conftest import END, System
from tests.proxy.replies import post
from tests.proxy.scripted import ScriptedWorker, speaks

COMPLETIONS = ("/v1/completions", {"prompt": "say"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say"}]})
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
JSON_POINT = ('{"x": 1, "y": -2}', '{\n  "x": 1,\n  "y": 2\n}')
NO_POINT = ('{"x": 1}', '{"x": "1", "y": 2}', "[]", "point")

CASES: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ({"response_format": {"type": "json_object"}}, ("{}", '{"a": [1, {"b": null}]}'), ("[]", "1", "{]")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}},
        JSON_POINT,
        NO_POINT,
    ),
    ({"structured_outputs": {"json": POINT}}, JSON_POINT, NO_POINT),
    ({"structured_outputs": {"json": json.dumps(POINT)}}, JSON_POINT, NO_POINT),
    ({"structured_outputs": {"json_object": True}}, ("{}",), ("[]",)),
    ({"structured_outputs": {"regex": "[ab]{2}"}}, ("ab", "bb"), ("a", "abc", "x")),
    ({"structured_outputs": {"choice": ["ja", 'say "no"', "ř\n"]}}, ("ja", 'say "no"', "ř\n"), ("j", "nein")),
    ({"structured_outputs": {"grammar": 'start: "a" b\nb: "b"+'}}, ("ab", "abbb"), ("a", "b")),
    ({"guided_json": POINT}, JSON_POINT, NO_POINT),
    ({"guided_regex": r"\d{3}"}, ("123",), ("12", "abc")),
    ({"guided_choice": ["left", "right"]}, ("left", "right"), ("lef", "up")),
    ({"guided_grammar": 'root ::= "yes" | "no" tail\ntail ::= [0-9]+'}, ("yes", "no12"), ("no", "maybe")),
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "a"}},
            }
        },
        "response_format",
    ),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 1}}, "guided_json"),
    ({"guided_json": {"not": {"type": "string"}}}, "guided_json"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_regex": "a" * 200_000}, "guided_regex"),
    ({"guided_regex": 7}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_choice": [f"w{i}" for i in range(5000)]}, "guided_choice"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
    ({"guided_grammar": "root ::= nowhere ::="}, "guided_grammar"),
    ({"guided_grammar": 'start: <no_such_token> "a"'}, "guided_grammar"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs"),
    ({"guided_regex": "(b{900}){1000}c"}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]


def fits(model: ServedModel, grammar: str, text: str) -> bool:
    """Whether the text, whole, is what the grammar says."""
    automaton = model.grammars.compile(grammar)
    matcher = automaton.matcher
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(("asked", "good", "bad"), CASES)
@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
async def test_every_way_to_ask_becomes_a_grammar(
    system: System,
    endpoint: tuple[str, dict[str, Any]],
    asked: dict[str, Any],
    good: tuple[str, ...],
    bad: tuple[str, ...],
) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    path, body = endpoint
    await post(system, path, **body, **asked, max_tokens=2)
    grammar = worker.generates[0].sampling.grammar
    for text in good:
        assert fits(system.frontend.model, grammar, text), text
    for text in bad:
        assert not fits(system.frontend.model, grammar, text), text


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
async def test_what_cannot_be_followed_is_refused_and_named(
    system: System, endpoint: tuple[str, dict[str, Any]]
) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    path, body = endpoint
    for asked, param in BAD:
        reply = await system.client.post(path, json=body | asked)
        assert reply.status_code == 400, (asked, reply.text)
        error = reply.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), (asked, error)
        assert len(error["message"]) < 2000
    assert worker.generates == []


async def test_a_schema_with_too_many_optional_properties_is_refused_before_the_work(system: System) -> None:
    properties = {f"p{number}": {"type": "null"} for number in range(3000)}
    schema = {"type": "object", "properties": {"inner": {"type": "object", "properties": properties}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "many", "schema": schema}}}
    reply = await system.client.post("/v1/completions", json={"prompt": "say"} | asked)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "response_format")
    assert "3001 properties" in error["message"] and str(MAX_OPTIONAL_PROPERTIES) in error["message"]


def test_required_properties_and_those_of_other_things_are_not_counted() -> None:
    point = {"properties": {"x": {}, "y": {}, "z": {}}, "required": ["x", "y"]}
    assert count_optional({"anyOf": [point, {"items": point}], "enum": ["properties"]}) == 2


@pytest.mark.parametrize("asked", [{"response_format": {"type": "text"}}, {"guided_regex": None}, {}])
async def test_without_a_wish_there_is_no_grammar(system: System, asked: dict[str, Any]) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    await post(system, "/v1/completions", prompt="say", max_tokens=2, **asked)
    assert worker.generates[0].sampling.grammar == ""


async def test_a_retry_carries_the_grammar_along(system: System) -> None:
    async def stumbles(worker: ScriptedWorker, generate: Generate) -> None:
        if generate.attempt == 0:
            worker.say(generate, 0, tuple(b"l"))
            worker.fail(generate, WorkerError("internal", "lost it"))
        else:
            worker.say(generate, 1, (*b"eft", END), "stop")

    worker = await system.worker("decode", stumbles)
    reply = await post(system, "/v1/completions", prompt="say", guided_choice=["left", "right"])
    assert reply["choices"][0]["text"] == "left"
    first, second = worker.generates
    assert first.sampling == second.sampling
    assert second.token_ids == (*b"say", *b"l")
