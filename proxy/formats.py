"""Replies in OpenAI's shapes: whole ones, and the chunks of a stream.

A chunk is on the path of every token: what does not change within a reply is encoded once, and the rest is
put together from bytes.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from common.messages import TokenLogprob
from common.tokenizer import Tokenizer
from proxy.errors import ApiError
from proxy.text import Piece

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity

encode = msgspec.json.encode


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Finished:
    """One choice, whole."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason


class Format(Protocol):
    """One endpoint's way to write a reply."""

    def first_chunk(self, index: int, prompt: tuple[TokenLogprob, ...]) -> bytes | None:
        """What a choice's stream begins with, told with its first token; ``prompt``: log-probabilities of the
        prompt, where they were asked for."""
        ...

    def chunk(self, index: int, piece: Piece, timings: dict[str, float] | None) -> bytes: ...

    def end(self, usage: Usage) -> bytes:
        """What a stream ends with."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with that cannot go on."""
        ...

    def whole(self, choices: list[Finished], usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of a reply share."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str, separator: str = "-") -> "Envelope":
        return cls(f"{prefix}{separator}{secrets.token_hex(16)}", int(time.time()), model)

    def body(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def event_prefix(self, kind: str) -> bytes:
        return b"data: " + encode(self.body(kind))[:-1] + b',"choices":['

    def usage_event(self, kind: str, usage: Usage) -> bytes:
        return event(self.body(kind) | {"choices": [], "usage": usage.body()})


def event(body: Json) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.encode() + b"\n\n"


def chat_logprobs(logprobs: list[TokenLogprob], tokenizer: Tokenizer) -> list[Json]:
    """As chats and responses tell them."""

    def entry(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": clamp(logprob), "bytes": list(raw)}

    return [
        entry(chosen.token_id, chosen.logprob) | {"top_logprobs": [entry(*pair) for pair in chosen.top]}
        for chosen in logprobs
    ]


def prompt_logprobs(
    token_ids: tuple[int, ...], entries: tuple[TokenLogprob, ...], tokenizer: Tokenizer
) -> list[Json | None] | None:
    """As vLLM tells them: for each prompt token the alternatives and itself by id, nothing for the first."""
    if not entries and len(token_ids) > 1:
        return None

    def shown(token_id: int, logprob: float, rank: int | None) -> Json:
        return {"logprob": clamp(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    found: list[Json | None] = [None]
    for entry in entries:
        ranked = {str(token): shown(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
        found.append({str(entry.token_id): shown(entry.token_id, entry.logprob, None)} | ranked)
    return found


def clamp(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
