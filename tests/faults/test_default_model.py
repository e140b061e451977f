"""The same promise with the real default model, whose steps take long enough for a fault to fall into one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.config import DEFAULT_MODEL
from common.model_source import resolve
from common.tokenizer import Tokenizer
from tests.faults.client import Client, Verdict, judge
from tests.faults.cluster import Cluster, running
from tests.faults.oracle import Case, Oracle
from tests.faults.relay import Faults
from tests.faults.support import ask_all, assert_equal

TEXTS = (
    "The capital of France is",
    "A short history of the lighthouse: " * 12,
    "def fibonacci(n):\n    " + "# a comment that takes some room\n    " * 20,
)


@pytest.fixture(scope="module")
def oracle_of_default() -> Oracle:
    return Oracle(DEFAULT_MODEL)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    options = ["--num-blocks=256", "--max-model-len=2048", "--heartbeat-interval-s=0.2"]
    async with running(tmp_path, DEFAULT_MODEL, options=options, relayed=True) as cluster:
        yield cluster


def cases_of_default(max_tokens: int) -> list[Case]:
    tokenizer = Tokenizer.load(resolve(DEFAULT_MODEL).directory)
    return [Case(tuple(tokenizer.encode(text)), max_tokens) for text in TEXTS]


@pytest.mark.timeout(300)
async def test_the_default_model_says_the_same_through_cuts_flips_and_deaths(
    pair: Cluster, oracle_of_default: Oracle
) -> None:
    asked = cases_of_default(24)
    oracle_of_default.references(asked)
    async with Client(pair.url, timeout_s=120.0) as client:
        assert_equal(*await ask_all(client, oracle_of_default, asked))
        pair.relays["d1"].set(forward=Faults(cut_after_bytes=3_000_000, flip_share=0.2, max_faults=2))
        fresh = [Case((*case.prompt[1:], 42), 12) for case in asked]
        assert_equal(*await ask_all(client, oracle_of_default, fresh))
        pair.relays["d1"].set()
        async with client.streaming(asked[1]) as stream:
            await stream.read(5)
            pair.restart("d1")
            reply = await stream.finish()
        assert judge(reply, oracle_of_default.reference(asked[1])) is Verdict.EQUAL, reply.error
        asking = asyncio.create_task(ask_all(client, oracle_of_default, asked))
        pair.restart("p1")
        assert_equal(*await asking)
        await pair.ready()
        await pair.quiet()
