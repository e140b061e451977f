"""The items that a response of /v1/responses is made of, as they grow."""

from dataclasses import dataclass, field
from typing import ClassVar

from proxy.formats import Json


@dataclass(slots=True)
class ThoughtsItem:
    prefix: ClassVar[str] = "rs"
    done_event: ClassVar[str] = "reasoning_text.done"
    id: str
    index: int
    text: str = ""
    is_done: bool = False
    is_cut: bool = False  # by the end of the tokens

    def body(self) -> Json:
        content = [self.part()] if self.text else []
        body = {"id": self.id, "type": "reasoning", "summary": [], "content": content}
        return body | {"status": _status(self)}

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def part_place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def delta(self, text: str) -> Json:
        self.text += text
        return self.part_place() | {"delta": text}

    def done(self) -> Json:
        return self.part_place() | {"text": self.text}


@dataclass(slots=True)
class MessageItem:
    prefix: ClassVar[str] = "msg"
    done_event: ClassVar[str] = "output_text.done"
    id: str
    index: int
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)
    is_done: bool = False
    is_cut: bool = False

    def body(self) -> Json:
        content = [self.part()] if self.text else []
        body = {"id": self.id, "type": "message", "role": "assistant", "content": content}
        return body | {"status": _status(self)}

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def part_place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def delta(self, text: str) -> Json:
        self.text += text
        return self.part_place() | {"delta": text}

    def done(self) -> Json:
        return self.part_place() | {"text": self.text, "logprobs": self.logprobs}


@dataclass(slots=True)
class CallItem:
    done_event: ClassVar[str] = "function_call_arguments.done"
    id: str
    index: int
    call_id: str
    name: str
    arguments: str = ""
    is_done: bool = False
    is_cut: bool = False

    def body(self) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
            "status": _status(self),
        }

    def delta(self, text: str) -> Json:
        self.arguments += text
        return {"item_id": self.id, "output_index": self.index, "delta": text}

    def done(self) -> Json:
        place = {"item_id": self.id, "output_index": self.index}
        return place | {"name": self.name, "arguments": self.arguments}


Item = ThoughtsItem | MessageItem | CallItem


def _status(item: Item) -> str:
    if not item.is_done:
        return "in_progress"
    return "incomplete" if item.is_cut else "completed"
