"""Where a sequence's time went.

Marks, set by the engine in ``Sequence.marks`` (``time.monotonic()``):

    queued       taken in by ``Engine.add``
    adopted      taken over from a prefill worker, instead of ``queued``
    scheduled    the first step with tokens of it began
    first_token  that engine's first token of it was sampled
    landed       a decode worker took it over
    finished     it ended

Between marks, steps with tokens of the sequence are charged to it (``common/step_meter.py``): what they took
to compute, and what to plan and to prepare blocks for.
"""

from common.sequence import Cost, Sequence

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
    """The spans that are complete so far, and what was charged in them, in seconds."""
    marks = sequence.marks
    spans = (_ADOPTED_SPANS if ADOPTED in marks else _PREFILL_SPANS) | _DECODE_SPANS
    complete = {name: span for name, span in spans.items() if marks.keys() >= set(span)}
    told = {name: marks[end] - marks[start] for name, (start, end) in complete.items()}
    if "prefill_s" in told:
        told |= _charged("prefill", sequence.prefill_cost)
    if "decode_s" in told:
        told |= _charged("decode", sequence.decode_cost)
    return told


def _charged(phase: str, cost: Cost) -> dict[str, float]:
    return {f"{phase}_kernel_s": cost.kernel_s, f"{phase}_cache_s": cost.cache_s}
