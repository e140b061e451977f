"""An assistant's message, taken apart as it comes: thoughts, content, calls of functions."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.call_text import READERS, Arguments, Began, Part, Reader
from proxy.reasoning import Reasoning


class Dialect(NamedTuple):
    """What the text of a message may hold besides content."""

    has_thoughts: bool = False
    starts_thinking: bool = False  # the prompt has opened them
    call_style: str = ""  # empty: calls are not looked for
    schemas: Mapping[str, Mapping[str, Any]] = {}  # of arguments, by function


@dataclass(slots=True)
class Call:
    """One function call, or what is new of it."""

    index: int
    id: str = ""  # in a delta: only where the call begins, and so the name
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    thoughts: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.thoughts or self.content or self.calls)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Assistant:
    def __init__(self, dialect: Dialect, new_id: Callable[[], str] = new_call_id) -> None:
        self._reasoning = Reasoning(dialect.starts_thinking) if dialect.has_thoughts else None
        self._reader: Reader | None = (
            READERS[dialect.call_style](dialect.schemas) if dialect.call_style else None
        )
        self._new_id = new_id
        self.num_calls = 0

    def push(self, text: str) -> Delta:
        delta = Delta()
        if self._reasoning is not None:
            delta.thoughts, text = self._reasoning.push(text)
        self._read(delta, text)
        return delta

    def finish(self) -> Delta:
        """What was held back; the message is over."""
        delta = Delta()
        if self._reasoning is not None:
            delta.thoughts, text = self._reasoning.finish()
            self._read(delta, text)
        if self._reader is not None:
            self._add(delta, self._reader.finish())
        return delta

    def whole(self, text: str) -> Delta:
        """All of a message at once: each call in one piece."""
        first, last = self.push(text), self.finish()
        calls: dict[int, Call] = {}
        for call in (*first.calls, *last.calls):
            known = calls.setdefault(call.index, Call(call.index))
            known.id, known.name = known.id or call.id, known.name or call.name
            known.arguments += call.arguments
        return Delta(first.thoughts + last.thoughts, first.content + last.content, list(calls.values()))

    def _read(self, delta: Delta, text: str) -> None:
        if self._reader is None:
            delta.content += text
        elif text:
            self._add(delta, self._reader.push(text))

    def _add(self, delta: Delta, parts: list[Part]) -> None:
        for part in parts:
            match part:
                case str():
                    delta.content += part
                case Began():
                    delta.calls.append(Call(self.num_calls, self._new_id(), part.name))
                    self.num_calls += 1
                case Arguments():
                    self._add_arguments(delta, part.text)

    def _add_arguments(self, delta: Delta, text: str) -> None:
        latest = self.num_calls - 1
        if not delta.calls or delta.calls[-1].index != latest:
            delta.calls.append(Call(latest))
        delta.calls[-1].arguments += text
