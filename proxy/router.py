"""Which workers serve a request. Policies are plain functions from what is known of the workers to a
choice."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

MAX_BLAME = 2  # a worker blamed this much for failures of a request is its last resort


class Candidate(NamedTuple):
    """A worker that takes new work, as the policies see it."""

    incarnation: str
    queued_tokens: int  # to be computed before a new request's turn
    num_sequences: int
    free_blocks: int
    block_size: int
    max_sequence_tokens: int  # 0: no limit known
    trusted: bool  # has not failed lately
    last_used: int  # grows with every dispatch


class Need(NamedTuple):
    num_tokens: int  # to prefill
    max_total_tokens: int  # with all output there may be
    blame: Mapping[str, int] = {}  # incarnation -> part in failures of this request
    hands_over: bool = True  # False: better served by one worker, without a transfer


class Snapshot(NamedTuple):
    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]
    expects_prefill: bool  # there have been prefill workers, or there should be
    allows_fallback: bool  # decode workers may stand in for them


class Choice(NamedTuple):
    prefill: str | None
    decode: str
    fallback: bool = False  # no prefill worker, though there should be one


Policy = Callable[[Snapshot, Need], Choice | None]


def least_loaded(snapshot: Snapshot, need: Need) -> Choice | None:
    """The prefill worker with the shortest queue and the decode worker with room and the fewest sequences;
    among equals the one used longest ago. None when nobody can serve the request now."""
    decode = [worker for worker in snapshot.decode if _can_hold(worker, need.max_total_tokens)]
    if not decode:
        return None
    best_decode = min(decode, key=lambda worker: _decode_order(worker, need))
    prefill = [worker for worker in snapshot.prefill if _may_prefill(worker, need)]
    if prefill and (need.hands_over or not snapshot.allows_fallback):
        best = min(prefill, key=lambda worker: _prefill_order(worker, need))
        return Choice(best.incarnation, best_decode.incarnation)
    if snapshot.expects_prefill and not snapshot.allows_fallback:
        return None
    return Choice(None, best_decode.incarnation, fallback=snapshot.expects_prefill)


def _can_hold(worker: Candidate, num_tokens: int) -> bool:
    return worker.max_sequence_tokens == 0 or num_tokens <= worker.max_sequence_tokens


def _may_prefill(worker: Candidate, need: Need) -> bool:
    blamed = need.blame.get(worker.incarnation, 0) >= MAX_BLAME
    return worker.trusted and not blamed and _can_hold(worker, need.num_tokens + 1)


def _prefill_order(worker: Candidate, need: Need) -> tuple[int, ...]:
    return need.blame.get(worker.incarnation, 0), worker.queued_tokens, worker.last_used


def _decode_order(worker: Candidate, need: Need) -> tuple[int, ...]:
    """A decode worker that failed is better than none, so distrust only sorts."""
    has_room = worker.free_blocks * worker.block_size > need.num_tokens
    blame = need.blame.get(worker.incarnation, 0)
    return not worker.trusted, blame, not has_room, worker.num_sequences, worker.last_used
