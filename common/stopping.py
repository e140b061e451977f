"""When a sequence is refused at the door, and when it ends."""

import math
from collections.abc import Collection

from common.messages import FinishReason, Refusal, Sampling
from common.sequence import Sequence


def finish_reason(
    sequence: Sequence, eos_token_ids: Collection[int], max_sequence_tokens: int
) -> FinishReason | None:
    """Why the sequence ends with its last token, which is an output token; None: it goes on."""
    sampling = sequence.sampling
    token_id = sequence.token_ids[-1]
    if sequence.num_output_tokens >= sampling.min_tokens:
        if token_id in sampling.stop_token_ids:
            return "stop"
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return "stop"
    if sequence.automaton is not None and token_id in eos_token_ids:
        return "stop"  # nothing else can follow
    if sequence.num_output_tokens >= sampling.max_tokens or len(sequence.token_ids) >= max_sequence_tokens:
        return "length"
    return None


def check_sequence(sequence: Sequence, vocab_size: int) -> None:
    """Raise ``Refusal`` for what would harm the step it takes part in, and with it other sequences. The
    proxy has said no to most of it already, but a worker does not depend on that."""
    token_ids, sampling = sequence.token_ids, sequence.sampling
    if not 0 < sequence.num_prompt_tokens <= len(token_ids):
        _refuse(f"num_prompt_tokens is {sequence.num_prompt_tokens}, with {len(token_ids)} tokens in all")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        _refuse(f"token_ids must lie in 0..{vocab_size - 1}")
    if math.isnan(sequence.deadline):
        _refuse("deadline_s is not a number")
    _check_sampling(sampling, vocab_size)
    if sequence.num_output_tokens >= sampling.max_tokens:
        _refuse(f"max_tokens is {sampling.max_tokens}, with {sequence.num_output_tokens} tokens of output")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        if any(not 0 <= token_id < vocab_size for token_id in ids):
            _refuse(f"{name}: token ids must lie in 0..{vocab_size - 1}")
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        _refuse("logit_bias must be finite")
    limits = {
        "temperature": (0, math.inf, sampling.temperature),
        "top_p": (0, 1, sampling.top_p),
        "min_p": (0, 1, sampling.min_p),
        "top_k": (0, math.inf, sampling.top_k),
        "num_logprobs": (0, math.inf, sampling.num_logprobs or 0),
        "num_prompt_logprobs": (0, math.inf, sampling.num_prompt_logprobs or 0),
        "repetition_penalty": (1e-6, 1e6, sampling.repetition_penalty),
        "presence_penalty": (-1e6, 1e6, sampling.presence_penalty),
        "frequency_penalty": (-1e6, 1e6, sampling.frequency_penalty),
    }
    for name, (low, high, value) in limits.items():
        if not low <= value <= high or math.isinf(value):  # not a number fails every comparison
            _refuse(f"{name} must lie in {low}..{high}, not {value}")


def _refuse(text: str) -> None:
    raise Refusal("invalid", text)
