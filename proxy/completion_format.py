"""Replies of /v1/completions."""

from common.messages import TokenLogprob
from common.tokenizer import Tokenizer
from proxy.errors import ApiError
from proxy.formats import DONE, Envelope, Finished, Json, Usage, clamp, encode, error_event, prompt_logprobs
from proxy.job import Job, Prompt
from proxy.text import Piece

KIND = "text_completion"


class CompletionFormat:
    def __init__(self, job: Job, tokenizer: Tokenizer, envelope: Envelope) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._envelope = envelope
        self._prefix = envelope.event_prefix(KIND)
        self._offsets: dict[int, int] = {}  # by choice: where the next token's text begins
        self._started: set[int] = set()

    def first_chunk(self, index: int, prompt: tuple[TokenLogprob, ...]) -> bytes | None:
        if not self._job.echo:
            return None
        piece = Piece(self._prompt_text(self._job.prompt_of(index)))
        return self._event(index, piece, self._echoed(index, prompt), None)

    def chunk(self, index: int, piece: Piece, timings: dict[str, float] | None) -> bytes:
        return self._event(index, piece, self._logprobs(index, piece.logprobs), timings)

    def _event(
        self, index: int, piece: Piece, logprobs: Json | None, timings: dict[str, float] | None
    ) -> bytes:
        extra = self._extra(index, piece, timings)
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self._prefix,
            index,
            encode(piece.text),
            b"null" if logprobs is None else encode(logprobs),
            encode(piece.finish_reason),
            b"," + encode(extra)[1:-1] if extra else b"",
        )

    def end(self, usage: Usage) -> bytes:
        return (self._envelope.usage_event(KIND, usage) if self._job.include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, choices: list[Finished], usage: Usage) -> bytes:
        body = self._envelope.body(KIND)
        body["choices"] = [self._choice(choice) for choice in choices]
        return encode(body | {"usage": usage.body()})

    def _choice(self, choice: Finished) -> Json:
        piece = Piece(choice.text, choice.token_ids, choice.logprobs)
        prompt = self._job.prompt_of(choice.index)
        told = self._echoed(choice.index, choice.prompt_logprobs) if self._job.echo else None
        logprobs = self._logprobs(choice.index, choice.logprobs)
        if told and logprobs:
            logprobs = {name: told[name] + logprobs[name] for name in told}
        fields = {
            "index": choice.index,
            "text": (self._prompt_text(prompt) if self._job.echo else "") + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        if self._job.tells_prompt_logprobs:
            told_prompt = prompt_logprobs(prompt.token_ids, choice.prompt_logprobs, self._tokenizer)
            fields["prompt_logprobs"] = told_prompt
        return fields | self._extra(choice.index, piece, choice.timings)

    def _extra(self, index: int, piece: Piece, timings: dict[str, float] | None) -> Json:
        extra: Json = {}
        if self._job.return_token_ids:
            if index not in self._started:
                self._started.add(index)
                extra["prompt_token_ids"] = self._job.prompt_of(index).token_ids
            extra["token_ids"] = piece.token_ids
        if self._job.return_workers and piece.worker:
            extra["worker"] = piece.worker
        if timings and self._job.timings:
            extra["timings"] = timings
        return extra

    def _prompt_text(self, prompt: Prompt) -> str:
        """Worked out here where tokens were given: only an echo shows it, and the first time that a token is
        seen costs as much as all else that is done to it."""
        return self._tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _echoed(self, index: int, prompt: tuple[TokenLogprob, ...]) -> Json | None:
        """Of the prompt that is echoed: the model says nothing about its first token."""
        first = TokenLogprob(self._job.prompt_of(index).token_ids[0], 0.0)
        told = self._logprobs(index, [first, *prompt])
        if told is not None:
            told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told

    def _logprobs(self, index: int, logprobs: list[TokenLogprob]) -> Json | None:
        if self._job.sampling.num_logprobs is None:
            return None
        text_of = self._tokenizer.token_text
        offset = self._offsets.get(index, 0)
        tokens, offsets = [text_of(entry.token_id) for entry in logprobs], []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [clamp(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._alternatives(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> Json | None:
        if not entry.top:
            return None
        chosen = (entry.token_id, entry.logprob)
        return {self._tokenizer.token_text(token): clamp(value) for token, value in (chosen, *entry.top)}
