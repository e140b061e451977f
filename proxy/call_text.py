"""How models write tool calls into their text, read as it comes.

    hermes       ``<tool_call>`` {"name": ..., "arguments": {...}} ``</tool_call>``, any number; Qwen too
    qwen3_coder  ``<tool_call><function=NAME><parameter=KEY>`` value ``</parameter></function></tool_call>``
    llama3_json  the whole message is {"name": ..., "parameters": {...}}, several with a semicolon between

What looked like a call and turns out to be none is text like any other.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from proxy.stop_strings import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
CALL_KEYS = ("name", "type", "parameters", "arguments")
PYTHON_TAG = "<|python_tag|>"


class Began(NamedTuple):
    """A call of this function begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """More JSON text of the latest call's arguments."""

    text: str


Part = str | Began | Arguments
Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by function


class Reader(Protocol):
    """Reads one message."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


class CallReader(Protocol):
    """Reads one call."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part] | None:
        """None: it is no call, and nothing of it was told."""
        ...


@dataclass(slots=True)
class JsonCall:
    """An object with a function's name and its arguments."""

    raw: str = ""
    ended: bool = False
    began: bool = False
    rest: str = ""  # what came after the object
    _depth: int = 0
    _is_string: bool = False
    _is_escaped: bool = False

    def push(self, text: str) -> list[Part]:
        self.raw += text
        if self.began:
            return self._arguments(text)
        found = HEAD.match(self.raw)
        if not found:
            return []
        self.began = True
        return [Began(_text(found[1])), *self._arguments(self.raw[found.end() :])]

    def finish(self) -> list[Part] | None:
        if self.began:
            return []
        try:
            call = json.loads(self.raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        given = call.get("arguments", call.get("parameters", {}))
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return [Began(call["name"]), Arguments(text)]

    def _arguments(self, text: str) -> list[Part]:
        """As much as belongs to the object of arguments; the closing brace around it is no part of it."""
        if self.ended:
            self.rest += text
            return []
        for index, character in enumerate(text):
            if self._is_end(character):
                self.ended, self.rest = True, text[index + 1 :]
                return [Arguments(text[: index + 1])]
        return [Arguments(text)] if text else []

    def _is_end(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string:
            self._is_escaped = character == "\\"
            self._is_string = character != '"'
        elif character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


@dataclass(slots=True)
class TaggedCall:
    """A function and its parameters, each in tags of its own. Values are texts, or JSON where the function's
    schema says that they are no texts."""

    schemas: Schemas
    raw: str = ""
    _name: str = ""
    _num_told: int = 0

    def push(self, text: str) -> list[Part]:
        self.raw += text
        parts: list[Part] = []
        if not self._name:
            found = FUNCTION.match(self.raw)
            if not found:
                return []
            self._name, self.raw = found[1], self.raw[found.end() :]
            parts.append(Began(self._name))
        while found := PARAMETER.match(self.raw):
            self.raw = self.raw[found.end() :]
            parts.append(self._argument(found[1], found[2]))
        return parts

    def finish(self) -> list[Part] | None:
        if not self._name:
            return None
        return [Arguments("}" if self._num_told else "{}")]

    def _argument(self, key: str, text: str) -> Arguments:
        value: Any = text
        schema = self.schemas.get(self._name, {}).get("properties", {}).get(key, {})
        if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
            try:
                value = json.loads(text)
            except ValueError:
                value = text
        self._num_told += 1
        pair = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        return Arguments(("{" if self._num_told == 1 else ", ") + pair)


@dataclass(slots=True)
class TagReader:
    """Calls between tags, in the midst of text."""

    new_call: Callable[[], CallReader]
    _held: str = ""
    _call: CallReader | None = None
    _inside: str = ""
    _space: str = ""  # after a call: it counts when text follows
    _follows_call: bool = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            tag = OPEN if self._call is None else CLOSE
            before, found, after = self._held.partition(tag)
            if not found:
                keep = overlap(before, tag)
                before, self._held = before[: len(before) - keep], before[len(before) - keep :]
                return parts + self._take(before)
            parts += self._take(before)
            self._held = after
            if self._call is None:
                self._call, self._inside, self._space = self.new_call(), "", ""
            else:
                parts += self._end(CLOSE)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        parts = self._take(held)
        return parts + self._end("") if self._call is not None else parts

    def _take(self, text: str) -> list[Part]:
        if self._call is None:
            return self._as_content(text)
        self._inside += text
        return self._call.push(text) if text else []

    def _as_content(self, text: str) -> list[Part]:
        """Space between calls, and after the last, is not part of the content."""
        self._space += text
        if not self._space or (self._follows_call and self._space.isspace()):
            return []
        text, self._space, self._follows_call = self._space, "", False
        return [text]

    def _end(self, tag: str) -> list[Part]:
        call, self._call = self._call, None
        assert call is not None
        parts = call.finish()
        self._follows_call = parts is not None
        return [OPEN + self._inside + tag] if parts is None else parts


@dataclass(slots=True)
class BareReader:
    """A message that is one JSON object, or several, and nothing else."""

    _held: str = ""
    _call: JsonCall | None = None
    _is_text: bool = False

    def push(self, text: str) -> list[Part]:
        if self._is_text:
            return [text] if text else []
        self._held += text
        if self._call is None:
            begun = self._held.lstrip().removeprefix(PYTHON_TAG).lstrip("; \n")
            if not begun or PYTHON_TAG.startswith(self._held.strip()):
                return []
            if not begun.startswith("{"):
                return self._as_text()
            self._call, text = JsonCall(), begun
        return self._feed(self._call, text)

    def finish(self) -> list[Part]:
        if self._call is None:
            return self._as_text() if self._held.strip(" \n;}") else []
        parts = self._call.finish()
        return self._as_text() if parts is None else parts

    def _feed(self, call: JsonCall, text: str) -> list[Part]:
        parts = call.push(text)
        first_key = FIRST_KEY.match(call.raw)
        if first_key and first_key[1] not in CALL_KEYS:
            return self._as_text()
        if call.ended:
            rest = call.rest.lstrip()
            if rest.startswith("}"):
                self._call, self._held = None, ""
                return parts + self.push(rest[1:])
        return parts

    def _as_text(self) -> list[Part]:
        self._is_text, self._call = True, None
        held, self._held = self._held, ""
        return [held] if held else []


def _text(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return literal.strip('"')


READERS: dict[str, Callable[[Schemas], Reader]] = {
    "hermes": lambda schemas: TagReader(JsonCall),
    "qwen3_coder": lambda schemas: TagReader(lambda: TaggedCall(schemas)),
    "llama3_json": lambda schemas: BareReader(),
}


def style_of(template: str) -> str:
    """How the model writes calls, as far as its template tells."""
    if "<function=" in template:
        return "qwen3_coder"
    if "python_tag" in template or '"parameters": ' in template:
        return "llama3_json"
    return "hermes"
