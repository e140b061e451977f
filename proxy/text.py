"""From a sequence's tokens to its text: characters cut by token borders, stop strings, the end.

Text that may be the beginning of a stop string, or of a character, is held back until it is known what it is.
"""

from dataclasses import dataclass, field

from common.messages import FinishReason, TokenLogprob
from common.tokenizer import IncrementalDetokenizer, Tokenizer
from proxy.attempt import Batch
from proxy.job import Job
from proxy.stop_strings import StopStrings


@dataclass(slots=True)
class Piece:
    """What one chunk tells the client about one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    worker: str = ""  # name of the one that sampled the last token


class Detokenized:
    """One choice's tokens, taken in batches and given out in pieces."""

    def __init__(self, tokenizer: Tokenizer, job: Job) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, job.skip_special_tokens)
        self._stop = StopStrings(job.stop, job.include_stop) if job.stop else None
        self._include_stop = job.include_stop
        self._min_tokens = job.sampling.min_tokens
        self._piece = Piece()
        self.num_tokens = 0

    def push(self, batch: Batch) -> Piece | None:
        """The next piece, None while its text is still held back. A piece with a finish reason is the
        last."""
        piece, stopped = self._piece, False
        for index, token_id in enumerate(batch.token_ids):
            self.num_tokens += 1
            piece.token_ids.append(token_id)
            if batch.logprobs:
                piece.logprobs.append(batch.logprobs[index])
            is_last = batch.finish_reason == "stop" and index == len(batch.token_ids) - 1
            if not is_last or self._include_stop:  # a token that ends the sequence is not part of its text
                stopped = self._add(piece, self._detokenizer.push(token_id))
            if stopped:
                break
        if stopped:
            piece.finish_reason = "stop"
        elif batch.finish_reason is not None:
            piece.finish_reason = batch.finish_reason
            piece.text += (self._stop.release() if self._stop else "") + self._detokenizer.flush()
        if not piece.text and piece.finish_reason is None:
            return None
        self._piece = Piece()
        return piece

    def _add(self, piece: Piece, text: str) -> bool:
        """True when a stop string is complete."""
        if self._stop is None or self.num_tokens < self._min_tokens:
            piece.text += text
            return False
        scan = self._stop.push(text)
        piece.text += scan.text
        return scan.stopped
