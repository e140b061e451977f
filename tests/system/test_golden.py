"""The tokens of a real model, by HTTP and through real processes, are those of the reference implementation.

Each set-up differs from the others in several ways at once (transport, chunk and block size, one process or
two), so that a few of them cover every value of each. All run in float32.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests import golden
from tests.golden import Golden
from tests.system.server import Server, serving

pytestmark = pytest.mark.timeout(1200)
REQUEST_TIMEOUT_S = 600.0
NUM_TOKENS = 64

SETUPS = {
    "zmq": ("--transport=zmq", "--max-num-batched-tokens=64", "--block-size=16", "--num-blocks=800"),
    "ucx": ("--transport=ucx", "--max-num-batched-tokens=512", "--block-size=32", "--num-blocks=400"),
    "colocated": ("--colocated", "--max-num-batched-tokens=16", "--block-size=16", "--num-blocks=800"),
}


@pytest.fixture(scope="module", params=SETUPS, ids=list(SETUPS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "ucx":
        pytest.importorskip("ucxx")
    with serving("--dtype=float32", *SETUPS[request.param]) as running:
        yield running


def complete(server: Server, prompt: Golden, **extra: Any) -> dict[str, Any]:
    body = {
        "model": "default",
        "prompt": prompt.prompt_ids,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body | extra, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def difference(prompt: Golden, reply: dict[str, Any]) -> str | None:
    token_ids = reply["choices"][0]["token_ids"]
    if len(token_ids) != NUM_TOKENS:
        return f"{prompt.name}: {len(token_ids)} tokens"
    return prompt.difference(token_ids)


def test_every_prompt_gives_the_reference_tokens_cold_and_eight_at_once(server: Server) -> None:
    prompts = list(golden.load().values())
    assert len(prompts) == 20
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda prompt: complete(server, prompt), prompts))
    differences = [difference(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
    assert [d for d in differences if d] == []


def test_cached_prompts_give_the_reference_tokens_alone(server: Server) -> None:
    prompts = golden.load()
    for prompt in (max(prompts.values(), key=lambda p: len(p.prompt_ids)), *list(prompts.values())[:2]):
        complete(server, prompt)
        reply = complete(server, prompt)
        assert difference(prompt, reply) is None
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == (len(prompt.prompt_ids) > 32)
