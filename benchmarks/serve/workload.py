"""Prompts to send: as token ids, so that lengths are exact, or as text of common English words, of which one
is about one token. What is random comes from the seed: the same options make the same requests."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from benchmarks.serve.traces import Recorded

Prompt = list[int] | str
Content = Literal["ids", "text"]

FIRST_TOKEN_ID = 300  # below are special tokens and single bytes
_COMMON = """
the of and to in is that it was for on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know get through back much before go good new write our used me
man too any day same right look think also around another came come work three word must because
does part even place well such here take
"""
WORDS = _COMMON.split()


class Planned(NamedTuple):
    """One request to send."""

    prompt: Prompt
    num_prompt_tokens: int  # about as many, where the prompt is text
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform from ``mean × (1 - spread)`` to ``mean × (1 + spread)``."""

    mean: int
    spread: float = 0.0

    def draw(self, chance: random.Random) -> int:
        low, high = self.mean * (1 - self.spread), self.mean * (1 + self.spread)
        return max(1, round(chance.uniform(low, high)))


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests look like. Every prompt begins with one of ``prefixes`` beginnings of ``prefix_tokens``
    tokens; the rest of it is its own."""

    content: Content
    prompt: Lengths
    output: Lengths
    prefix_tokens: int = 0
    prefixes: int = 1
    max_token_id: int = 30_000


def planned(shape: Shape, seed: int) -> Iterator[Planned]:
    """Without end."""
    chance = random.Random(seed)
    write = _writer(shape)
    while True:
        total = max(shape.prompt.draw(chance), shape.prefix_tokens + 1)
        parts = (
            [(f"{seed} prefix {chance.randrange(shape.prefixes)}", shape.prefix_tokens)]
            if shape.prefix_tokens
            else []
        )
        parts.append((f"{seed} {chance.random()}", total - shape.prefix_tokens))
        yield Planned(write(parts), total, shape.output.draw(chance))


def replayed(shape: Shape, trace: Sequence[Recorded], divisor: float, seed: int) -> Iterator[Planned]:
    """The requests of a trace in order, lengths divided by ``divisor``; equal blocks are equal tokens."""
    write = _writer(shape)
    for number, recorded in enumerate(trace):
        total = max(1, round(recorded.num_prompt_tokens / divisor))
        parts = _blocks(recorded, number, total, divisor)
        prompt = write([(f"{seed} {name}", count) for name, count in parts])
        yield Planned(prompt, total, max(1, round(recorded.num_output_tokens / divisor)))


def _blocks(recorded: Recorded, number: int, total: int, divisor: float) -> list[tuple[str, int]]:
    """Parts of a prompt: what it is the same as, and how long it is."""
    if not recorded.block_ids:
        return [(f"request {number}", total)]
    parts, left = [], total
    size = max(1, round(recorded.block_tokens / divisor))
    for block_id in recorded.block_ids:
        parts.append((f"block {block_id}", min(size, left)))
        left -= min(size, left)
    return [*parts, (f"request {number}", left)]


def _writer(shape: Shape) -> Callable[[list[tuple[str, int]]], Prompt]:
    """Makes a prompt of parts: equal names make equal beginnings."""

    def ids(parts: list[tuple[str, int]]) -> Prompt:
        choices = range(FIRST_TOKEN_ID, shape.max_token_id)
        return [token for name, count in parts for token in random.Random(name).choices(choices, k=count)]

    def text(parts: list[tuple[str, int]]) -> Prompt:
        words = [word for name, count in parts for word in random.Random(name).choices(WORDS, k=count)]
        return " ".join(words)

    return ids if shape.content == "ids" else text
