"""How one worker is picked from several that would all do. Plain functions; all they may know is in their
arguments."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from proxy.fleet import Candidate, Need


class Side(NamedTuple):
    """What makes prefill and decode workers different to pick."""

    load: Callable[[Candidate], int]
    slack: Callable[[Need], int]  # how much more load than the least loaded one's is nothing to mind


PREFILL = Side(load=lambda worker: worker.queued_tokens, slack=lambda need: need.num_tokens)
DECODE = Side(load=lambda worker: worker.num_sequences, slack=lambda need: 4)

Pick = Callable[[Sequence[Candidate], Need, Side], Candidate]


def round_robin(workers: Sequence[Candidate], need: Need, side: Side) -> Candidate:
    return min(workers, key=lambda worker: worker.last_used)


def random(workers: Sequence[Candidate], need: Need, side: Side) -> Candidate:
    return workers[int(need.draws[0] * len(workers))]


def power_of_two(workers: Sequence[Candidate], need: Need, side: Side) -> Candidate:
    """The less loaded of two taken at random: nearly as good as the least loaded of all, and what several
    proxies know late does not send them all to the same worker. (M. Mitzenmacher, The Power of Two Choices in
    Randomized Load Balancing, 2001.)"""
    if len(workers) == 1:
        return workers[0]
    first = int(need.draws[0] * len(workers))
    second = int(need.draws[1] * (len(workers) - 1))
    return least_loaded([workers[first], workers[second + (second >= first)]], need, side)


def least_loaded(workers: Sequence[Candidate], need: Need, side: Side) -> Candidate:
    """Among equals the one used longest ago."""
    return min(workers, key=lambda worker: (side.load(worker), worker.last_used))


def prefix_aware(workers: Sequence[Candidate], need: Need, side: Side) -> Candidate:
    """The one that holds most of the prompt, of those that have little more to do than the least loaded."""
    most = 2 * min(map(side.load, workers)) + side.slack(need)
    balanced = [worker for worker in workers if side.load(worker) <= most]
    return min(balanced, key=lambda w: (need.num_lacking(w), side.load(w), w.last_used))


def consistent_hash(workers: Sequence[Candidate], need: Need, side: Side) -> Candidate:
    """The same one for all requests of a session, for as long as it is there: when workers come and go, only
    sessions of these move (rendezvous hashing, D. Thaler and C. Ravishankar, 1998). Without a session, the
    least loaded."""
    if not need.session:
        return least_loaded(workers, need, side)
    return max(workers, key=lambda worker: _rank(need.session, worker.name or worker.incarnation))


def _rank(session: str, worker: str) -> bytes:
    return hashlib.blake2b(f"{len(session)} {session} {worker}".encode(), digest_size=8).digest()


PICKS: Mapping[str, Pick] = {
    "round_robin": round_robin,
    "random": random,
    "power_of_two": power_of_two,
    "least_loaded": least_loaded,
    "prefix_aware": prefix_aware,
    "consistent_hash": consistent_hash,
}
