import openai
import pytest
from openai import AsyncOpenAI

from tests.proxy.conftest import System
from tests.proxy.replies import chunks_of, post, streamed_text
from tests.proxy.scripted import speaks

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def test_a_reply_has_every_field_of_the_official_type(system: System) -> None:
    worker = await system.worker("decode", speaks(b"hi there"))
    reply = await post(system, PATH, messages=HELLO, max_tokens=8)
    parsed = openai.types.chat.ChatCompletion.model_validate(reply)
    assert parsed.object == "chat.completion"
    (choice,) = parsed.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hi there")
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert bytes(worker.generates[0].token_ids) == b"<user>hello<assistant>"


async def test_a_stream_tells_the_role_once_and_the_end_once(system: System) -> None:
    text = "čau 🙂".encode()
    await system.worker("decode", speaks(text))
    chunks = await chunks_of(system, PATH, messages=HELLO, max_tokens=len(text))
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
        assert chunk["object"] == "chat.completion.chunk"
        assert "finish_reason" in chunk["choices"][0]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert sum("role" in delta for delta in deltas) == 1
    assert streamed_text(chunks) == text.decode()
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("name", ["tiny", "default"])
async def test_the_official_client_works_unchanged(system: System, name: str) -> None:
    await system.worker("decode", speaks(b"hello"))
    async with AsyncOpenAI(base_url=f"{system.client.base_url}/v1", api_key="none") as client:
        reply = await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5
        )
        assert reply.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5
        listed = [model.id async for model in client.models.list()]
        assert listed == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=name, prompt="x" * 5000)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "limits",
    [{"max_completion_tokens": 7}, {"max_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 9}],
)
async def test_max_completion_tokens_is_heeded_and_wins(system: System, limits: dict[str, int]) -> None:
    await system.worker("decode", speaks(b"x" * 100))
    reply = await post(system, PATH, messages=HELLO, **limits)
    assert reply["usage"]["completion_tokens"] == 7
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_without_a_limit_a_chat_may_run_to_the_end_of_the_context(system: System) -> None:
    worker = await system.worker("decode", speaks(b"x"), max_sequence_tokens=100)
    await post(system, PATH, messages=HELLO)
    generate = worker.generates[0]
    assert generate.sampling.max_tokens == 100 - len(generate.token_ids)


async def test_logprobs_have_the_chat_shape(system: System) -> None:
    await system.worker("decode", speaks("é".encode()))
    reply = await post(system, PATH, messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=1)
    logprobs = openai.types.chat.ChatCompletion.model_validate(reply).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [bytes(entry.bytes or []) for entry in logprobs.content] == [b"\xc3", b"\xa9"]
    assert [entry.logprob for entry in logprobs.content] == [-0.5, -0.5]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [1, 1]
    plain = await post(system, PATH, messages=HELLO, max_tokens=2, logprobs=True)
    assert [e["top_logprobs"] for e in plain["choices"][0]["logprobs"]["content"]] == [[], []]
    chunks = await chunks_of(system, PATH, messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=1)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == reply["choices"][0]["logprobs"][
        "content"
    ]


async def test_messages_may_have_parts_names_and_other_roles(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    messages = [
        {"role": "system", "content": "be brief", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "user", "content": ""},
    ]
    await post(system, PATH, messages=messages, max_tokens=2)
    assert (
        bytes(worker.generates[0].token_ids) == b"<system>be brief<user>one two<assistant><user><assistant>"
    )


async def test_n_chats_stream_with_a_role_each(system: System) -> None:
    await system.worker("decode", speaks(b"hello"))
    chunks = await chunks_of(system, PATH, messages=HELLO, n=3, max_tokens=5)
    for index in range(3):
        assert streamed_text(chunks, index) == "hello"
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 3
