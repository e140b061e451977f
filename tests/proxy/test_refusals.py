"""What is refused is refused at the edge, in OpenAI's shape, and no worker hears of it."""

import gzip
import json
from typing import Any

import pytest

from common.config import ProxyConfig
from proxy.schema import ChatBody, CompletionBody, Options
from proxy.served_model import ServedModel
from tests.proxy.conftest import System, system_of
from tests.proxy.scripted import speaks

COMPLETION = {"prompt": "say"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}

BAD_OPTIONS: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 2.5),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 7),
    ("top_p", [1]),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 1e300),
    ("n", 0),
    ("n", -1),
    ("n", 10**6),
    ("n", "two"),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 1.5),
    ("max_tokens", 10**18),
    ("min_tokens", -1),
    ("min_tokens", 500),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", ["x"] * 10**5),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 7),
    ("seed", "x"),
    ("seed", 2**70),
    ("logit_bias", {"97": 200}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"100000": 1}),
    ("logit_bias", {str(i): 1 for i in range(5000)}),
    ("stop_token_ids", [100000]),
    ("stop_token_ids", [-1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("structured_outputs", {"regex": "(a"}),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 10**6),
    ("use_beam_search", True),
    ("timeout_s", 0),
    ("priority", "high"),
    ("cache_salt", "x" * 1000),
    ("user", 7),
]
BAD_COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", None),
    ("prompt", 7),
    ("prompt", [1, "a"]),
    ("prompt", [-1]),
    ("prompt", [300]),
    ("prompt", [1.5]),
    ("prompt", [[1], "a"]),
    ("prompt", {"a": 1}),
    ("prompt", "\ud800"),
    ("logprobs", 10**6),
    ("logprobs", -1),
    ("logprobs", True),
    ("suffix", "x"),
    ("best_of", 3),
]
BAD_CHATS: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", None),
    ("messages", "hello"),
    ("messages", [{}]),
    ("messages", [{"role": "", "content": "x"}]),
    ("messages", [{"role": "user", "content": 7}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("logprobs", 3),
    ("top_logprobs", 10**4),
    ("top_logprobs", 2),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "retrieval", "function": {"name": "f"}}]),
    ("tools", [{"type": "function", "function": {"name": "no spaces"}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]),
    ("tool_choice", "required"),
    ("tool_choice", "maybe"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
    ("functions", [{"name": "f"}]),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"messages": []}),
]


async def refused(system: System, path: str, body: object) -> dict[str, Any]:
    reply = await system.client.post(path, json=body)
    assert 400 <= reply.status_code < 500, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


async def test_bad_options_name_the_parameter_and_reach_no_worker(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    for name, value in BAD_OPTIONS:
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            extra = {"max_tokens": 100} if name == "min_tokens" else {}
            error = await refused(system, path, body | extra | {name: value})
            assert error["param"] == name, (path, name, value, error)
    assert worker.generates == []


async def test_bad_completions_name_the_parameter_and_reach_no_worker(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    for name, value in BAD_COMPLETIONS:
        if value == "\ud800":
            text = '{"prompt": "\\ud800"}'
            reply = await system.client.post("/v1/completions", content=text)
            assert reply.status_code == 400
            continue
        error = await refused(system, "/v1/completions", COMPLETION | {name: value})
        assert error["param"] == name, (name, value, error)
    assert worker.generates == []


async def test_bad_chats_name_the_parameter_and_reach_no_worker(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    for name, value in BAD_CHATS:
        error = await refused(system, "/v1/chat/completions", CHAT | {name: value})
        assert error["param"] == name, (name, value, error)
    assert worker.generates == []


@pytest.mark.parametrize(
    ("param", "messages"),
    [
        ("messages[1].role", [*CHAT["messages"], {"role": "wizard", "content": "x"}]),
        ("messages[0].content", [{"role": "user", "content": None}]),
        ("messages[0].content", [{"role": "system"}, *CHAT["messages"]]),
        ("messages[1].content", [*CHAT["messages"], {"role": "tool", "tool_call_id": "a"}]),
    ],
)
async def test_a_message_that_means_nothing_is_named(system: System, param: str, messages: Any) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    for path in ("/v1/chat/completions", "/tokenize"):
        assert (await refused(system, path, {"messages": messages}))["param"] == param
    where = param.partition(".")[0].replace("messages", "input")
    error = await refused(system, "/v1/responses", {"input": messages})
    assert where in error["message"]
    assert worker.generates == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "n": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000,
        b'{"unknown":' + b'{"a":' * 100_000,
        b"\x80\x04\x95pickle",
    ],
)
async def test_broken_bodies_are_refused(system: System, body: bytes) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = await system.client.post(path, content=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert worker.generates == []


async def test_null_is_the_same_as_absent(system: System) -> None:
    await system.worker("decode", speaks(b"hello"))
    for path, body, kind in (
        ("/v1/completions", COMPLETION, CompletionBody),
        ("/v1/chat/completions", CHAT, ChatBody),
    ):
        names = [*Options.__struct_fields__, *kind.__struct_fields__]
        nulls = {name: None for name in names if name not in ("prompt", "messages", "max_tokens")}
        reply = await system.client.post(path, json=nulls | {"max_tokens": 5, "guided_json": None} | body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 5
        assert (await system.client.post(path, json=body | {"max_tokens": None})).status_code == 200


async def test_a_prompt_that_is_too_long_is_told_with_both_numbers(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt", "5000"),
        ("/v1/completions", {"prompt": "x" * 4000, "max_tokens": 97}, "prompt", "4097"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "50"),
    ]
    for path, body, param, number in cases:
        for stream in (False, True):
            error = await refused(system, path, body | {"stream": stream})
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == param
            assert "4096" in error["message"]
            assert number in error["message"]
    assert worker.generates == []
    fits = await system.client.post("/v1/completions", json={"prompt": "x" * 4000, "max_tokens": 96})
    assert fits.status_code == 200


async def test_more_messages_than_the_context_has_tokens_are_refused_without_rendering_them(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of thousands would keep all other clients waiting."""
    monkeypatch.setattr("proxy.chat_job.render", None)
    body = {"messages": [{"role": "user", "content": ""}] * 5000}
    reply = await system.client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_an_unknown_model_is_not_found(system: System) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        reply = await system.client.post(path, json=body | {"model": "gpt-9"})
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-9" in error["message"]


async def test_unknown_fields_are_ignored_and_named_in_a_header(system: System) -> None:
    await system.worker("decode", speaks(b"ok"))
    body = COMPLETION | {"max_tokens": 2, "metadata": {"a": 1}, "store": True, "bad\r\nname": 1, "user": "me"}
    reply = await system.client.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert reply.headers["x-baton-ignored"] == "metadata, store"


async def test_of_a_million_unknown_fields_one_is_named(system: System) -> None:
    await system.worker("decode", speaks(b"ok"))
    fields = "".join(f',"k{number}":1' for number in range(10**6))
    reply = await system.client.post("/v1/completions", content=f'{{"prompt":"say","max_tokens":2{fields}}}')
    assert (reply.status_code, reply.headers["x-baton-ignored"]) == (200, "k0")
    reply = await system.client.post(
        "/v1/completions", content=f'{{"prompt":"say","audio":{{"a":1}}{fields}}}'
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "audio")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
async def test_a_body_that_is_compressed_is_refused_with_what_would_be_taken(
    system: System, path: str
) -> None:
    content = gzip.compress(json.dumps(COMPLETION).encode())
    reply = await system.client.post(path, content=content, headers={"Content-Encoding": "gzip"})
    assert (reply.status_code, reply.headers["accept-encoding"]) == (415, "identity")
    assert reply.json()["error"]["code"] == "unsupported_encoding" and "'gzip'" in reply.text


async def test_a_body_that_is_too_large_is_refused_whole(model: ServedModel) -> None:
    async with system_of(model, ProxyConfig(max_body_bytes=100_000)) as system:
        worker = await system.worker("decode", speaks(b"ok"))
        reply = await system.client.post("/v1/completions", json={"prompt": "x" * 200_000})
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"
        ids = [1] * 4000
        assert (await system.client.post("/v1/completions", json={"prompt": ids})).status_code == 200
        assert len(worker.generates) == 1
