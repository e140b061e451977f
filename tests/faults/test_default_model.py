"""The same promise with the real default model, whose steps take long enough for a fault to fall into one.

Here the oracle is another implementation altogether: its tokens lie in ``tests/golden``."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.config import DEFAULT_MODEL
from tests import golden
from tests.faults.client import Client, Verdict, judge
from tests.faults.cluster import Cluster, running
from tests.faults.oracle import Case, Reference
from tests.faults.relay import Faults

MAX_TOKENS = 32


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    options = ["--num-blocks=256", "--max-model-len=2048", "--heartbeat-interval-s=0.2"]
    # Alone in its role, and slow to come back on a crowded machine.
    patience = ["--worker-wait-s=90"]
    async with running(
        tmp_path, DEFAULT_MODEL, options=options, proxy_options=patience, relayed=True
    ) as cluster:
        yield cluster


def known() -> list[tuple[Case, Reference]]:
    """The shortest prompts and a longer one."""
    prompts = sorted(golden.load().values(), key=lambda prompt: len(prompt.prompt_ids))
    return [
        (
            Case(tuple(prompt.prompt_ids), MAX_TOKENS),
            Reference(tuple(prompt.token_ids[:MAX_TOKENS]), tuple(prompt.margins[:MAX_TOKENS])),
        )
        for prompt in (*prompts[:3], prompts[len(prompts) // 2])
    ]


async def ask_known(client: Client) -> None:
    async def one(asked: Case, reference: Reference) -> None:
        reply = await client.complete(asked, stream=True)
        assert judge(reply, reference) is Verdict.EQUAL, (reply.error, reply.token_ids)

    await asyncio.gather(*(one(*each) for each in known()))


@pytest.mark.timeout(300)
async def test_the_default_model_says_the_same_through_cuts_flips_and_deaths(pair: Cluster) -> None:
    async with Client(pair.url, timeout_s=120.0) as client:
        pair.relays["d1"].set(forward=Faults(cut_after_bytes=3_000_000, flip_share=0.2, max_faults=2))
        await ask_known(client)
        assert pair.relays["d1"].counts["forward_flips"] + pair.relays["d1"].counts["forward_cuts"] > 0
        pair.relays["d1"].set()
        asked, reference = known()[-1]
        async with client.streaming(asked) as stream:
            await stream.read(5)
            pair.restart("d1")
            reply = await stream.finish()
        assert judge(reply, reference) is Verdict.EQUAL, reply.error
        asking = asyncio.create_task(ask_known(client))
        pair.restart("p1")
        await asking
        await pair.ready()
        await pair.quiet()
