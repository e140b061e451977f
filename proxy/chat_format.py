"""Replies of /v1/chat/completions."""

from common.messages import TokenLogprob
from common.tokenizer import Tokenizer
from proxy.formats import Envelope, Finished, Json, Usage, clamp, encode, event
from proxy.job import Job
from proxy.text import Piece

CHUNK = "chat.completion.chunk"


class ChatFormat:
    def __init__(self, job: Job, tokenizer: Tokenizer, envelope: Envelope) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._envelope = envelope
        self._prefix = envelope.event_prefix(CHUNK)

    def first_chunk(self, index: int) -> bytes | None:
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
        extra = self._extra(piece.token_ids, timings)
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self._prefix,
            index,
            b'{"content":%b}' % encode(piece.text) if piece.text else b"{}",
            encode(self._logprobs(piece.logprobs)),
            encode(piece.finish_reason),
            b"," + encode(extra)[1:-1] if extra else b"",
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._envelope.usage_event(CHUNK, usage)

    def whole(self, choices: list[Finished], usage: Usage) -> bytes:
        body = self._envelope.body("chat.completion")
        body["choices"] = [self._choice(choice) for choice in choices]
        if self._job.return_token_ids:
            body["prompt_token_ids"] = self._job.prompt_of(0).token_ids
        return encode(body | {"usage": usage.body()})

    def _choice(self, choice: Finished) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        } | self._extra(choice.token_ids, choice.timings)

    def _extra(self, token_ids: list[int], timings: dict[str, float] | None) -> Json:
        extra: Json = {"token_ids": token_ids} if self._job.return_token_ids else {}
        return extra | {"timings": timings} if timings and self._job.timings else extra

    def _logprobs(self, logprobs: list[TokenLogprob]) -> Json | None:
        if self._job.sampling.num_logprobs is None:
            return None
        entries = []
        for entry in logprobs:
            chosen = self._entry(entry.token_id, entry.logprob)
            entries.append(chosen | {"top_logprobs": [self._entry(*pair) for pair in entry.top]})
        return {"content": entries, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": clamp(logprob), "bytes": list(raw)}
