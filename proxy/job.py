"""What a client asked for, checked and in tokens: a type of its own, so that nothing unchecked reaches a
worker."""

import hashlib
import secrets
from typing import Any, Literal

import msgspec
from msgspec import Struct

from common.messages import Sampling
from proxy.assistant import Dialect
from proxy.caller import Caller

Endpoint = Literal["completions", "chat", "responses"]


class Prompt(Struct, frozen=True):
    token_ids: tuple[int, ...]
    text: str | None  # for echo; None: given as tokens
    max_tokens: int


class Job(Struct, frozen=True):
    endpoint: Endpoint
    prompts: tuple[Prompt, ...]
    n: int  # choices for each prompt
    sampling: Sampling  # without the prompt's max_tokens and the choice's seed
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    timeout_s: float
    echo: bool = False
    tells_prompt_logprobs: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_workers: bool = False
    timings: bool = False
    priority: int = 0
    cache_salt: str = ""
    trace: str = ""
    caller: Caller = Caller()
    dialect: Dialect = Dialect()  # of chats
    has_named_call: bool = False  # the client said which function is to be called
    response_fields: dict[str, Any] = {}  # what a response repeats of its request
    ignored: tuple[str, ...] = ()  # fields of the body that had no effect

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, index: int) -> Prompt:
        """Choices are numbered prompt by prompt."""
        return self.prompts[index // self.n]

    def sampling_of(self, index: int) -> Sampling:
        """Choices of one prompt differ by their seeds; the first keeps the client's own."""
        seed = derived_seed(self.sampling.seed, index % self.n)
        return msgspec.structs.replace(self.sampling, max_tokens=self.prompt_of(index).max_tokens, seed=seed)


def derived_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_seed() -> int:
    return secrets.randbits(63)
