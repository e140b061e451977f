import asyncio

import openai
import pytest

from common.messages import Generate
from tests.proxy.conftest import END, System
from tests.proxy.replies import chunks_of, post, streamed_text
from tests.proxy.scripted import ScriptedWorker, speaks

PATH = "/v1/completions"


async def ends_with_a_special_token(worker: ScriptedWorker, generate: Generate) -> None:
    worker.say(generate, 0, (*b"done", END), "stop")


async def says_its_seed(worker: ScriptedWorker, generate: Generate) -> None:
    text = str(generate.sampling.seed).encode()
    worker.say(generate, 0, tuple(text), "stop")
    worker.say(generate, 0, tuple(text), "stop")


async def test_a_reply_has_every_field_of_the_official_type(system: System) -> None:
    await system.worker("decode", speaks(b"hello world"))
    reply = await post(system, PATH, prompt="say", max_tokens=5)
    parsed = openai.types.Completion.model_validate(reply)
    assert reply["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert (parsed.object, parsed.model) == ("text_completion", "tiny")
    assert parsed.usage is not None
    assert parsed.usage.to_dict() == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_adds_up_to_the_reply(system: System) -> None:
    text = "čeština 🙂 漢字".encode()
    await system.worker("decode", speaks(text))
    chunks = await chunks_of(system, PATH, prompt="say", max_tokens=len(text))
    openai.types.Completion.model_validate(chunks[-1])
    for chunk in chunks:
        assert "�" not in chunk["choices"][0]["text"]
        assert "usage" not in chunk
    assert streamed_text(chunks) == text.decode()
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def test_a_character_cut_off_by_max_tokens_is_the_same_streamed_or_not(system: System) -> None:
    await system.worker("decode", speaks("a🙂".encode()))
    chunks = await chunks_of(system, PATH, prompt="say", max_tokens=3)
    reply = await post(system, PATH, prompt="say", max_tokens=3)
    assert streamed_text(chunks) == reply["choices"][0]["text"] == "a�"


@pytest.mark.parametrize(
    ("options", "told"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
async def test_usage_is_streamed_once_and_only_when_asked_for(
    system: System, options: object, told: bool
) -> None:
    await system.worker("decode", speaks(b"hello"))
    chunks = await chunks_of(system, PATH, prompt="say", max_tokens=5, stream_options=options)
    assert sum("usage" in chunk for chunk in chunks) == told
    if told:
        assert chunks[-1]["choices"] == []
        reply = await post(system, PATH, prompt="say", max_tokens=5)
        assert chunks[-1]["usage"] == reply["usage"]


async def test_sixteen_tokens_unless_asked_for_more(system: System) -> None:
    worker = await system.worker("decode", speaks(b"x" * 50))
    reply = await post(system, PATH, prompt="say")
    assert reply["usage"]["completion_tokens"] == 16
    await post(system, PATH, prompt="y" * 4090)
    assert worker.generates[1].sampling.max_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        ([97, 98], [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([[97, 98], [99]], [(97, 98), (99,)]),
        (["ab"], [(97, 98)]),
        ([[256]], [(256,)]),
    ],
)
async def test_prompts_come_as_text_or_ids_one_or_many(
    system: System, prompt: object, expected: list[tuple[int, ...]]
) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    reply = await post(system, PATH, prompt=prompt, max_tokens=2)
    assert sorted(generate.token_ids for generate in worker.generates) == sorted(expected)
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))
    assert reply["usage"]["prompt_tokens"] == sum(len(ids) for ids in expected)


@pytest.mark.parametrize("n", [2, 8])
async def test_n_choices_come_from_n_sequences_with_seeds_of_their_own(system: System, n: int) -> None:
    worker = await system.worker("decode", says_its_seed)
    reply = await post(system, PATH, prompt=["a", "b"], n=n, max_tokens=30, seed=7)
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * n))
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    seeds = {generate.sampling.seed for generate in worker.generates}
    assert len(seeds) == n
    assert 7 in seeds
    assert len({generate.request_id for generate in worker.generates}) == 2 * n
    assert reply["usage"]["prompt_tokens"] == 2
    again = await post(system, PATH, prompt=["a", "b"], n=n, max_tokens=30, seed=7)
    assert again["choices"] == reply["choices"]


async def test_n_choices_stream_side_by_side(system: System) -> None:
    await system.worker("decode", speaks(b"hello"))
    chunks = await chunks_of(system, PATH, prompt="say", n=3, max_tokens=5)
    for index in range(3):
        assert streamed_text(chunks, index) == "hello"
        ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert ends.count("length") == 1
        assert ends[-1] == "length"


async def test_without_a_seed_every_request_draws_one(system: System) -> None:
    worker = await system.worker("decode", speaks(b"ok"))
    for _ in range(2):
        await post(system, PATH, prompt="a", max_tokens=2)
    first, second = worker.generates
    assert first.sampling.seed != second.sampling.seed


async def test_logprobs_have_one_entry_for_each_token(system: System) -> None:
    await system.worker("decode", speaks(b"hey"))
    reply = await post(system, PATH, prompt="say", max_tokens=3, logprobs=2)
    logprobs = openai.types.Completion.model_validate(reply).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["h", "e", "y"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None
    assert all(len(alternatives) == 3 for alternatives in logprobs.top_logprobs)
    chunks = await chunks_of(system, PATH, prompt="say", max_tokens=3, logprobs=2)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [entry for part in streamed for entry in part[key]] == reply["choices"][0]["logprobs"][key]


async def test_the_token_that_ends_a_reply_is_counted_but_not_shown(system: System) -> None:
    await system.worker("decode", ends_with_a_special_token)
    reply = await post(system, PATH, prompt="say", max_tokens=9, return_token_ids=True)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("done", "stop")
    assert reply["usage"]["completion_tokens"] == 5
    assert choice["token_ids"] == [*b"done", END]
    assert choice["prompt_token_ids"] == list(b"say")


async def test_token_ids_are_streamed_when_asked_for(system: System) -> None:
    await system.worker("decode", speaks("é!".encode()))
    chunks = await chunks_of(system, PATH, prompt="say", max_tokens=3, return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == list("é!".encode())
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list(b"say")
    assert sum("prompt_token_ids" in chunk["choices"][0] for chunk in chunks) == 1


@pytest.mark.parametrize("prompt", ["hi ", list(b"hi ")])
async def test_echo_puts_the_prompt_before_the_text(system: System, prompt: object) -> None:
    await system.worker("decode", speaks(b"bye"))
    reply = await post(system, PATH, prompt=prompt, max_tokens=3, echo=True)
    assert reply["choices"][0]["text"] == "hi bye"
    chunks = await chunks_of(system, PATH, prompt=prompt, max_tokens=3, echo=True)
    assert streamed_text(chunks) == "hi bye"


async def test_timings_are_told_when_asked_for(system: System) -> None:
    await system.worker("decode", speaks(b"hey"))
    reply = await post(system, PATH, prompt="say", max_tokens=3, timings=True)
    timings = reply["choices"][0]["timings"]
    assert 0 <= timings["route_s"] <= timings["time_to_first_token_s"] <= timings["total_s"]
    assert timings["num_attempts"] == 1
    assert "timings" not in (await post(system, PATH, prompt="say", max_tokens=3))["choices"][0]
    chunks = await chunks_of(system, PATH, prompt="say", max_tokens=3, timings=True)
    told = ["timings" in chunk["choices"][0] for chunk in chunks]
    assert told == [False] * (len(chunks) - 1) + [True]


async def test_cached_tokens_are_those_that_the_prefill_found(system: System) -> None:
    async def cached(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, tuple(b"ok"), "length", num_cached_tokens=16)

    await system.worker("decode", cached)
    reply = await post(system, PATH, prompt="x" * 40, max_tokens=2, n=2)
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_sampling_options_reach_the_worker_as_they_are(system: System) -> None:
    worker = await system.worker("decode", speaks(b"x" * 20))
    options = {
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": -3,
        "ignore_eos": True,
    }
    body = options | {
        "logit_bias": {"97": 5, "98": -100},
        "stop_token_ids": [3, 4],
        "priority": 2,
        "cache_salt": "tenant",
    }
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    reply = await system.client.post(PATH, json=body | {"prompt": "a", "max_tokens": 20}, headers=headers)
    assert reply.status_code == 200
    (generate,) = worker.generates
    assert {name: getattr(generate.sampling, name) for name in options} == options
    assert generate.sampling.logit_bias == {97: 5.0, 98: -100.0}
    assert generate.sampling.stop_token_ids == (3, 4)
    assert (generate.priority, generate.cache_salt) == (2, "tenant")
    assert generate.trace == headers["traceparent"]


async def test_the_first_chunk_does_not_wait_for_the_last_token(system: System) -> None:
    go_on = asyncio.Event()

    async def waits(worker: ScriptedWorker, generate: Generate) -> None:
        worker.say(generate, 0, tuple(b"first"))
        await go_on.wait()
        worker.say(generate, 5, tuple(b" last"), "stop")

    await system.worker("decode", waits)
    body = {"prompt": "say", "max_tokens": 20, "stream": True}
    async with system.client.stream("POST", PATH, json=body) as reply:
        lines = reply.aiter_lines()
        assert '"text":"first"' in await anext(lines)
        go_on.set()
        assert [line async for line in lines][-2] == "data: [DONE]"
