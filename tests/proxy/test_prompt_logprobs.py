"""Log-probabilities of prompts: with an echo, or as vLLM tells them."""

import pytest

from common.messages import Generate, WorkerError
from tests.proxy.conftest import System
from tests.proxy.replies import chunks_of, post, streamed_text
from tests.proxy.scripted import ScriptedWorker, speaks

PATH = "/v1/completions"


async def test_an_echo_with_logprobs_tells_those_of_the_prompt_too(system: System) -> None:
    worker = await system.worker("decode", speaks(b"hey"))
    reply = await post(system, PATH, prompt="ab\u00e9", max_tokens=3, logprobs=2, echo=True)
    (choice,) = reply["choices"]
    assert choice["text"] == "abéhey"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:2] == ["a", "b"]
    assert logprobs["tokens"][-3:] == ["h", "e", "y"]
    # Null for the first token, as OpenAI's models did and evaluation tools expect, whatever the types say.
    assert logprobs["token_logprobs"] == [None, -1.5, -1.5, -1.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5, 6]
    assert worker.generates[0].sampling.num_prompt_logprobs == 2


async def test_a_stream_with_an_echo_adds_up_to_the_reply(system: System) -> None:
    await system.worker("decode", speaks(b"hey"))
    body = {"prompt": ["ab", "xyz"], "max_tokens": 3, "logprobs": 1, "echo": True}
    reply = await post(system, PATH, **body)
    chunks = await chunks_of(system, PATH, **body)
    for index, choice in enumerate(reply["choices"]):
        assert streamed_text(chunks, index) == choice["text"]
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        for key, entries in choice["logprobs"].items():
            assert [entry for part in parts for entry in part[key]] == entries, key


async def test_they_are_told_as_vllm_tells_them(system: System) -> None:
    await system.worker("decode", speaks(b"hey"))
    reply = await post(system, PATH, prompt="abc", max_tokens=3, prompt_logprobs=2)
    first, second, third = reply["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "98": {"logprob": -1.5, "rank": None, "decoded_token": "b"},
        "0": {"logprob": 0.0, "rank": 1, "decoded_token": "\x00"},
        "1": {"logprob": -1.0, "rank": 2, "decoded_token": "\x01"},
    }
    assert "99" in third
    messages = [{"role": "user", "content": "x"}]
    chat = await post(system, "/v1/chat/completions", messages=messages, max_tokens=2, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in (await post(system, PATH, prompt="abc", max_tokens=3))["choices"][0]


async def test_they_are_computed_where_the_output_is(system: System) -> None:
    prefill = await system.worker("prefill")
    decode = await system.worker("decode", speaks(b"hey"))
    await post(system, PATH, prompt="abc", max_tokens=3, prompt_logprobs=0)
    assert (len(prefill.generates), len(decode.generates)) == (0, 1)


async def test_a_retry_does_not_lose_them(system: System) -> None:
    async def stumbles(worker: ScriptedWorker, generate: Generate) -> None:
        if generate.attempt == 0:
            worker.say(generate, 0, tuple(b"h"))
            worker.fail(generate, WorkerError("internal", "lost it"))
        else:
            worker.say(generate, 1, tuple(b"ey"), "length")

    await system.worker("decode", stumbles)
    reply = await post(system, PATH, prompt="abc", max_tokens=3, prompt_logprobs=0)
    assert reply["choices"][0]["text"] == "hey"
    assert len(reply["choices"][0]["prompt_logprobs"]) == 3


async def test_a_worker_that_does_not_tell_them_is_an_error(system: System) -> None:
    async def forgets(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, tuple(b"hey"), "length", prompt_logprobs=())

    await system.worker("decode", forgets)
    reply = await system.client.post(PATH, json={"prompt": "abc", "max_tokens": 3, "prompt_logprobs": 0})
    assert reply.status_code == 500


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_told_is_refused(system: System, options: dict[str, object], param: str) -> None:
    reply = await system.client.post(PATH, json={"prompt": "abc"} | options)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
