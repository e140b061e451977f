"""Replies of /v1/chat/completions."""

from common.messages import TokenLogprob
from common.tokenizer import Tokenizer
from proxy.assistant import Assistant, Call, Delta
from proxy.errors import ApiError
from proxy.formats import (
    DONE,
    Envelope,
    Finished,
    Json,
    Usage,
    chat_logprobs,
    encode,
    error_event,
    event,
    prompt_logprobs,
)
from proxy.job import Job
from proxy.text import Piece

CHUNK = "chat.completion.chunk"


class ChatFormat:
    def __init__(self, job: Job, tokenizer: Tokenizer, envelope: Envelope) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._envelope = envelope
        self._prefix = envelope.event_prefix(CHUNK)
        is_plain = not (job.dialect.has_thoughts or job.dialect.call_style)
        self._assistants = None if is_plain else [Assistant(job.dialect) for _ in range(job.num_choices)]
        self._tells_tokens = job.return_token_ids or job.sampling.num_logprobs is not None

    def first_chunk(self, index: int, prompt: tuple[TokenLogprob, ...]) -> bytes | None:
        choice: Json = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        body = self._envelope.body(CHUNK) | {"choices": [choice]}
        if self._job.return_token_ids:
            body["prompt_token_ids"] = self._job.prompt_of(index).token_ids
        return event(body)

    def chunk(self, index: int, piece: Piece, timings: dict[str, float] | None) -> bytes:
        if self._assistants is None:
            delta, reason = (
                b'{"content":%b}' % encode(piece.text) if piece.text else b"{}",
                piece.finish_reason,
            )
            return self._event(index, piece, delta, reason, timings)
        assistant = self._assistants[index]
        found = assistant.push(piece.text)
        if piece.finish_reason is None:
            if not found and not self._tells_tokens:
                return b""
            return self._event(index, piece, encode(_delta(found)), None, timings)
        rest = assistant.finish()
        chunks = self._event(index, Piece(), encode(_delta(found)), None, None) if found and rest else b""
        end = self._reason(piece.finish_reason, assistant)
        return chunks + self._event(index, piece, encode(_delta(rest or found)), end, timings)

    def _event(
        self, index: int, piece: Piece, delta: bytes, reason: str | None, timings: dict[str, float] | None
    ) -> bytes:
        extra = self._extra(piece.token_ids, timings)
        if self._job.return_workers and piece.worker:
            extra["worker"] = piece.worker
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self._prefix,
            index,
            delta,
            encode(self._logprobs(piece.logprobs)),
            encode(reason),
            b"," + encode(extra)[1:-1] if extra else b"",
        )

    def _reason(self, reason: str | None, assistant: Assistant) -> str | None:
        """A call that the client asked for by name is no news, to OpenAI."""
        has_called = assistant.num_calls > 0 and not self._job.has_named_call
        return "tool_calls" if reason == "stop" and has_called else reason

    def end(self, usage: Usage) -> bytes:
        return (self._envelope.usage_event(CHUNK, usage) if self._job.include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, choices: list[Finished], usage: Usage) -> bytes:
        body = self._envelope.body("chat.completion")
        body["choices"] = [self._choice(choice) for choice in choices]
        if self._job.return_token_ids:
            body["prompt_token_ids"] = self._job.prompt_of(0).token_ids
        if self._job.sampling.num_prompt_logprobs is not None:
            ids, entries = self._job.prompt_of(0).token_ids, choices[0].prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs(ids, entries, self._tokenizer)
        return encode(body | {"usage": usage.body()})

    def _choice(self, choice: Finished) -> Json:
        assistant = Assistant(self._job.dialect)
        message = _message(assistant.whole(choice.text))
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._reason(choice.finish_reason, assistant),
        } | self._extra(choice.token_ids, choice.timings)

    def _extra(self, token_ids: list[int], timings: dict[str, float] | None) -> Json:
        extra: Json = {"token_ids": token_ids} if self._job.return_token_ids else {}
        return extra | {"timings": timings} if timings and self._job.timings else extra

    def _logprobs(self, logprobs: list[TokenLogprob]) -> Json | None:
        if self._job.sampling.num_logprobs is None:
            return None
        return {"content": chat_logprobs(logprobs, self._tokenizer), "refusal": None}


def _message(found: Delta) -> Json:
    message: Json = {"role": "assistant", "content": found.content, "refusal": None}
    if found.thoughts:
        message["reasoning_content"] = found.thoughts
    if found.calls:
        message["content"] = found.content or None
        message["tool_calls"] = [_call(call) for call in found.calls]
    return message


def _call(call: Call) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(found: Delta) -> Json:
    delta: Json = {}
    if found.thoughts:
        delta["reasoning_content"] = found.thoughts
    if found.content:
        delta["content"] = found.content
    if found.calls:
        delta["tool_calls"] = [_call_delta(call) for call in found.calls]
    return delta


def _call_delta(call: Call) -> Json:
    """Id, type and name come once, with the first piece of a call."""
    if call.id:
        return {"index": call.index} | _call(call)
    return {"index": call.index, "function": {"arguments": call.arguments}}
