"""What the fault tests share: prompts, questions asked together, and verdicts on the answers."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tests.faults.client import Client, Reply, Verdict, judge
from tests.faults.oracle import Case, Oracle


class Answer(NamedTuple):
    case: Case
    reply: Reply
    verdict: Verdict


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """No two seeds share a beginning."""
    source = random.Random(f"prompt {seed}")
    return tuple(source.randrange(256) for _ in range(num_tokens))


def case(num_tokens: int, max_tokens: int, seed: int = 0, temperature: float = 0.0) -> Case:
    return Case(prompt(num_tokens, seed), max_tokens, temperature, seed)


def cases(count: int, num_tokens: int | tuple[int, int], max_tokens: int, seed: int = 0) -> list[Case]:
    """Half of them greedy, half drawn by seed."""
    low, high = (num_tokens, num_tokens) if isinstance(num_tokens, int) else num_tokens
    source = random.Random(seed)
    return [
        case(source.randint(low, high), max_tokens, 1000 * seed + index, temperature=float(index % 2))
        for index in range(count)
    ]


async def ask(client: Client, oracle: Oracle, asked: Case, stream: bool = False, **extra: Any) -> Answer:
    reply = await client.complete(asked, stream, **extra)
    return Answer(asked, reply, judge(reply, oracle.reference(asked)))


async def ask_all(
    client: Client, oracle: Oracle, asked: Iterable[Case], at_once: int = 8, **extra: Any
) -> list[Answer]:
    """All of them, ``at_once`` at a time, every other one as a stream."""
    wanted = list(asked)
    oracle.references(wanted)
    gate = asyncio.Semaphore(at_once)

    async def one(index: int, asked: Case) -> Answer:
        async with gate:
            return await ask(client, oracle, asked, stream=index % 2 == 0, **extra)

    return list(await asyncio.gather(*(one(index, each) for index, each in enumerate(wanted))))


def tally(answers: Sequence[Answer]) -> Counter[Verdict]:
    return Counter(answer.verdict for answer in answers)


def assert_equal(*answers: Answer) -> None:
    bad = [answer for answer in answers if answer.verdict is not Verdict.EQUAL]
    assert not bad, describe(bad, len(answers))


def assert_never_wrong(*answers: Answer) -> None:
    """Equal, or an error that says so; nothing else and nothing stuck."""
    bad = [answer for answer in answers if answer.verdict in (Verdict.WRONG, Verdict.HUNG)]
    assert not bad, describe(bad, len(answers))


def describe(bad: Sequence[Answer], total: int) -> str:
    lines = [
        f"{verdict.value}: prompt of {len(asked.prompt)}, {reply.status} {reply.error!r},"
        f" {len(reply.token_ids)} of {asked.max_tokens} tokens {reply.token_ids[:8]}"
        for asked, reply, verdict in bad[:5]
    ]
    return "\n".join([f"{len(bad)} of {total} answers are not what they should be", *lines])
