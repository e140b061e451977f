"""Clients that ask without pause and keep the score."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from tests.faults.client import Client, Reply, Verdict, judge
from tests.faults.oracle import Case, Oracle, Reference

MAX_EXAMPLES = 5


class Mix(NamedTuple):
    """What clients ask for."""

    prompt_tokens: tuple[int, int] = (1, 600)
    max_tokens: tuple[int, int] = (1, 48)
    stream_share: float = 0.5
    leave_share: float = 0.05  # of requests whose client goes away at some moment


@dataclass(slots=True)
class Score:
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    num_left: int = 0
    examples: list[str] = field(default_factory=list)  # of what should not be

    @property
    def num_requests(self) -> int:
        return self.verdicts.total()

    def add(self, case: Case, reply: Reply, reference: Reference) -> Verdict:
        verdict = judge(reply, reference)
        self.verdicts[verdict] += 1
        if verdict is not Verdict.EQUAL and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(
                f"{verdict.value}: prompt of {len(case.prompt)}, {reply.status} {reply.error!r}, "
                f"{len(reply.token_ids)} of {case.max_tokens} tokens, {reply.finish_reason!r}"
            )
        return verdict


def draw_cases(seed: int, count: int, mix: Mix, vocab_size: int = 256) -> list[Case]:
    """Prompts share no prefix, and half of them are sampled with a seed."""
    source = random.Random(seed)
    return [
        Case(
            prompt=tuple(source.randrange(vocab_size) for _ in range(source.randint(*mix.prompt_tokens))),
            max_tokens=source.randint(*mix.max_tokens),
            temperature=source.choice((0.0, 1.0)),
            seed=index,
        )
        for index in range(count)
    ]


class Load:
    """``num_clients`` clients, each with one request at a time, drawn from ``cases``."""

    def __init__(
        self, client: Client, oracle: Oracle, cases: Sequence[Case], mix: Mix, num_clients: int, seed: int
    ) -> None:
        self.score = Score()
        self._client = client
        self._cases = cases
        self._references = dict(zip(cases, oracle.references(cases), strict=True))
        self._mix = mix
        self._random = random.Random(seed)
        self._stopping = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(num_clients)]

    async def stop(self) -> Score:
        """Ask nothing more, and wait for the replies under way."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        return self.score

    async def _ask_on(self) -> None:
        while not self._stopping.is_set():
            await self._ask(self._random.choice(self._cases))

    async def _ask(self, case: Case) -> None:
        if self._random.random() < self._mix.leave_share:
            return await self._leave(case, self._random.random())
        reply = await self._client.complete(case, self._random.random() < self._mix.stream_share)
        verdict = self.score.add(case, reply, self._references[case])
        if verdict is Verdict.ERROR:  # a client that is told to come back later does
            await asyncio.sleep(0.2)

    async def _leave(self, case: Case, after_s: float) -> None:
        """Go away in the middle; the tokens read until then must be right."""
        self.score.num_left += 1
        asking = asyncio.create_task(self._client.complete(case, stream=True))
        await asyncio.wait([asking], timeout=after_s)
        asking.cancel()
        try:
            reply = await asking
        except (asyncio.CancelledError, httpx.TransportError):
            return
        self.score.add(case, reply, self._references[case])
