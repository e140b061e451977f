"""Messages of models that think and call functions, cut anywhere, come apart in the same way."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.assistant import Assistant, Delta, Dialect

SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
}
HERMES = Dialect(call_style="hermes", schemas=SCHEMAS)
XML = Dialect(call_style="qwen3_coder", schemas=SCHEMAS)
LLAMA = Dialect(call_style="llama3_json", schemas=SCHEMAS)
THINKS = Dialect(has_thoughts=True)
PARIS = {"city": "Paris", "days": 3}

Summary = tuple[str, str, list[tuple[str, object]]]


def summary(delta: Delta) -> Summary:
    return delta.thoughts, delta.content, [(call.name, arguments(call.arguments)) for call in delta.calls]


def arguments(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def whole(dialect: Dialect, text: str) -> Summary:
    return summary(Assistant(dialect).whole(text))


def in_pieces(dialect: Dialect, pieces: list[str]) -> Summary:
    """As a client puts a stream together; every call must begin with its id and name, once."""
    assistant = Assistant(dialect)
    total = Delta()
    for delta in [*map(assistant.push, pieces), assistant.finish()]:
        total.thoughts += delta.thoughts
        total.content += delta.content
        for call in delta.calls:
            if call.id:
                assert call.name
                assert call.index == len(total.calls)
                total.calls.append(call)
            else:
                assert not call.name
                total.calls[call.index].arguments += call.arguments
    return summary(total)


TWO_CALLS = (
    'Let me see.\n<tool_call>{"name":"weather","arguments":{"city":"}{\\"]","days":3}}</tool_call>\n'
    '<tool_call>\n{"arguments": {"x": [1, {"y": {}}]}, "name": "other"}\n</tool_call>\n'
)
TAGGED_CALL = (
    "Sure.<tool_call>\n<function=weather>\n<parameter=city>\nPa\nris 7\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
CASES: list[tuple[Dialect, str, Summary]] = [
    (HERMES, "just text", ("", "just text", [])),
    (HERMES, "1 < 2 <tool", ("", "1 < 2 <tool", [])),
    (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        ("", "", [("weather", PARIS)]),
    ),
    (
        HERMES,
        TWO_CALLS,
        ("", "Let me see.\n", [("weather", {"city": '}{"]', "days": 3}), ("other", {"x": [1, {"y": {}}]})]),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}', ("", "", [("f", {})])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", {})])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", {"a": 1})]),
    ),
    (HERMES, "<tool_call>no call</tool_call> more", ("", "<tool_call>no call</tool_call> more", [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a', ("", "", [("f", '{"a')])),
    (
        XML,
        TAGGED_CALL,
        ("", "Sure.", [("weather", {"city": "Pa\nris 7", "days": 3})]),
    ),
    (XML, "<tool_call>\n<function=weather>\n</function>\n</tool_call>", ("", "", [("weather", {})])),
    (
        XML,
        "<tool_call><function=weather><parameter=days>many</parameter></function></tool_call>",
        ("", "", [("weather", {"days": "many"})]),
    ),
    (
        LLAMA,
        '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}',
        ("", "", [("weather", PARIS)]),
    ),
    (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
        ("", "", [("a", {}), ("b", {})]),
    ),
    (LLAMA, "No call.", ("", "No call.", [])),
    (LLAMA, '{"answer": {"name": "x"}}', ("", '{"answer": {"name": "x"}}', [])),
    (LLAMA, '{"name": "Bob", "age": 3}', ("", "", [("Bob", {})])),
    (LLAMA, '{"name"', ("", '{"name"', [])),
    (THINKS, "<think>\nhm\n\nso\n</think>\n\nYes.", ("hm\n\nso\n", "Yes.", [])),
    (THINKS, "  <think>hm</think>a<think>b", ("hm", "a<think>b", [])),
    (THINKS, "no thoughts", ("", "no thoughts", [])),
    (THINKS, "<thinner>", ("", "<thinner>", [])),
    (THINKS, "<think>never ends</thi", ("never ends</thi", "", [])),
    (THINKS, " ", ("", " ", [])),
    (Dialect(has_thoughts=True, starts_thinking=True), "\nhm</think>Yes.", ("hm", "Yes.", [])),
    (
        Dialect(has_thoughts=True, call_style="hermes", schemas=SCHEMAS),
        '<think>call <tool_call>?</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        ("call <tool_call>?", "", [("f", {"a": 1})]),
    ),
]


@pytest.mark.parametrize(("dialect", "text", "expected"), CASES)
def test_a_message_comes_apart(dialect: Dialect, text: str, expected: Summary) -> None:
    assert whole(dialect, text) == expected


@pytest.mark.parametrize(("dialect", "text", "expected"), CASES)
def test_a_message_in_single_characters_comes_apart_in_the_same_way(
    dialect: Dialect, text: str, expected: Summary
) -> None:
    assert in_pieces(dialect, list(text)) == expected


@given(st.data())
def test_a_message_cut_anywhere_comes_apart_in_the_same_way(data: st.DataObject) -> None:
    dialect, text, expected = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert in_pieces(dialect, pieces) == expected


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "<parameter=a>", "</parameter>"]
BITS = [*TAGS, '{"name": "f", "arguments": ', "{", "}", '"', "\\", "text", " ", ";"]


@given(st.lists(st.sampled_from(BITS), max_size=12), st.sampled_from([HERMES, XML, LLAMA]))
def test_anything_can_be_read(pieces: list[str], dialect: Dialect) -> None:
    both = dialect._replace(has_thoughts=True)
    assert in_pieces(both, pieces) == whole(both, "".join(pieces))


def test_arguments_are_told_before_the_call_is_over() -> None:
    assistant = Assistant(HERMES)
    (call,) = assistant.push('<tool_call>{"name": "f", "arguments": {"text": "long ').calls
    assert (call.name, call.arguments) == ("f", '{"text": "long ')
    (more,) = assistant.push("story").calls
    assert (more.index, more.id, more.arguments) == (0, "", "story")
