"""Where a sequence's time went.

Marks, set by the engine in ``Sequence.marks`` (``time.monotonic()``):

    queued       taken in by ``Engine.add``
    adopted      taken over from a prefill worker, instead of ``queued``
    scheduled    the first step with tokens of it began
    first_token  that engine's first token of it was sampled
    landed       a decode worker took it over
    finished     it ended
"""

from common.sequence import Sequence

QUEUED = "queued"
ADOPTED = "adopted"
SCHEDULED = "scheduled"
FIRST_TOKEN = "first_token"
LANDED = "landed"
FINISHED = "finished"

# Seconds by name, each from one mark to another. An engine that adopts a sequence does not queue and prefill
# it: there the same marks bound the wait for its first step and that step.
_PREFILL_SPANS = {"queue_s": (QUEUED, SCHEDULED), "prefill_s": (SCHEDULED, FIRST_TOKEN)}
_ADOPTED_SPANS = {"decode_wait_s": (ADOPTED, SCHEDULED), "first_step_s": (SCHEDULED, FIRST_TOKEN)}
_DECODE_SPANS = {"decode_s": (FIRST_TOKEN, FINISHED)}


def timings_of(sequence: Sequence) -> dict[str, float]:
    """The spans that are complete so far, in seconds."""
    marks = sequence.marks
    spans = (_ADOPTED_SPANS if ADOPTED in marks else _PREFILL_SPANS) | _DECODE_SPANS
    complete = {name: span for name, span in spans.items() if marks.keys() >= set(span)}
    return {name: marks[end] - marks[start] for name, (start, end) in complete.items()}
