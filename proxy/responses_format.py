"""Replies of /v1/responses: a list of items (thoughts, messages, calls), whole or as events that build it.

response.created, response.in_progress
for every item  response.output_item.added, its parts and deltas, response.output_item.done
at the end      response.completed, .incomplete or .failed, with the whole response once more
"""

import uuid
from typing import Any, TypeVar

from common.messages import TokenLogprob
from common.tokenizer import Tokenizer
from proxy.assistant import Assistant, Call, Delta
from proxy.errors import ApiError
from proxy.formats import Envelope, Finished, Json, Usage, chat_logprobs, encode
from proxy.job import Job
from proxy.response_items import CallItem, Item, MessageItem, ThoughtsItem
from proxy.text import Piece

TextItem = TypeVar("TextItem", ThoughtsItem, MessageItem)


class ResponsesFormat:
    def __init__(self, job: Job, tokenizer: Tokenizer, envelope: Envelope) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._envelope = envelope
        self._assistant = Assistant(job.dialect)
        self._items: list[Item] = []
        self._num_events = 0
        self._finish_reason: str | None = None

    def first_chunk(self, index: int, prompt: tuple[TokenLogprob, ...]) -> bytes | None:
        body = self._body("in_progress")
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def chunk(self, index: int, piece: Piece, timings: dict[str, float] | None) -> bytes:
        delta = self._assistant.push(piece.text)
        events = self._tell(delta, piece)
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
            events += self._tell(self._assistant.finish(), Piece()) + self._close()
        return events

    def end(self, usage: Usage) -> bytes:
        status = self._status()
        return self._event(status, response=self._body(status, usage))

    def failure(self, error: ApiError) -> bytes:
        body = self._body("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("failed", response=body)

    def whole(self, choices: list[Finished], usage: Usage) -> bytes:
        (choice,) = choices
        self._finish_reason = choice.finish_reason
        delta = self._assistant.whole(choice.text)
        self._tell(delta, Piece(logprobs=choice.logprobs))
        self._close()
        return encode(self._body(self._status(), usage))

    def _status(self) -> str:
        return "completed" if self._finish_reason == "stop" else "incomplete"

    def _body(self, status: str, usage: Usage | None = None) -> Json:
        fields: dict[str, Any] = {
            "id": self._envelope.id,
            "object": "response",
            "created_at": self._envelope.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._envelope.model,
            "output": [item.body() for item in self._items] if status != "in_progress" else [],
            "usage": self._usage(usage) if usage else None,
        }
        return fields | self._job.response_fields

    def _usage(self, usage: Usage) -> Json:
        thoughts = "".join(item.text for item in self._items if isinstance(item, ThoughtsItem))
        num_thoughts = len(self._tokenizer.encode(thoughts, add_special_tokens=False)) if thoughts else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_thoughts},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _tell(self, delta: Delta, piece: Piece) -> bytes:
        """The events of what is new; thoughts come before content, and content before calls."""
        events = b""
        if delta.thoughts:
            thoughts, opening = self._open(ThoughtsItem)
            events += opening + self._event("reasoning_text.delta", **thoughts.delta(delta.thoughts))
        if delta.content:
            message, opening = self._open(MessageItem)
            logprobs = chat_logprobs(piece.logprobs, self._tokenizer)
            message.logprobs += logprobs
            told = message.delta(delta.content)
            events += opening + self._event("output_text.delta", **told, logprobs=logprobs)
        for call in delta.calls:
            events += self._tell_call(call)
        return events

    def _tell_call(self, call: Call) -> bytes:
        events = b""
        if call.id:
            events += self._close()
            item = CallItem(new_id("fc"), len(self._items), call.id, call.name)
            self._items.append(item)
            events += self._event("output_item.added", output_index=item.index, item=item.body())
        current = self._items[-1]
        assert isinstance(current, CallItem)
        if call.arguments:
            events += self._event("function_call_arguments.delta", **current.delta(call.arguments))
        return events

    def _open(self, kind: type[TextItem]) -> tuple[TextItem, bytes]:
        """The item that text of this kind goes to, and the events that come before."""
        current = self._items[-1] if self._items else None
        if isinstance(current, kind) and not current.is_done:
            return current, b""
        events = self._close()
        item = kind(new_id(kind.prefix), len(self._items))
        self._items.append(item)
        events += self._event("output_item.added", output_index=item.index, item=item.body())
        return item, events + self._event("content_part.added", **item.part_place(), part=item.part())

    def _close(self) -> bytes:
        """The events that end the latest item."""
        item = self._items[-1] if self._items else None
        if item is None or item.is_done:
            return b""
        item.is_done = True
        item.is_cut = self._finish_reason == "length"
        events = self._event(item.done_event, **item.done())
        if not isinstance(item, CallItem):
            events += self._event("content_part.done", **item.part_place(), part=item.part())
        return events + self._event("output_item.done", output_index=item.index, item=item.body())

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        body = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(body))


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
