"""The workers, and what a request needs of them, as routing sees both."""

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.messages import Pace

UNLIMITED = sys.maxsize


class Candidate(NamedTuple):
    """A worker that takes new work."""

    incarnation: str
    queued_tokens: int  # to be computed before a new request's turn
    num_sequences: int
    free_blocks: int
    block_size: int
    max_sequence_tokens: int
    trusted: bool  # has not failed lately
    last_used: int  # grows with every dispatch
    name: str = ""
    pace: Pace = Pace()
    block_bytes: int = 0
    links: Mapping[str, float] = {}  # bytes/s to decode workers, by their incarnation
    mean_link: float = 0.0  # of these
    locality: Mapping[str, str] = {}
    seat: str = ""  # the cores that it has, alone or with others that name them alike; empty: not known


class Targets(NamedTuple):
    """What a request is promised, in seconds; 0: nothing."""

    ttft_s: float = 0.0
    itl_s: float = 0.0


class Need(NamedTuple):
    num_tokens: int  # to prefill
    max_total_tokens: int  # with all output there may be
    blame: Mapping[str, int] = {}  # incarnation -> part in failures of this request
    hands_over: bool = True  # False: better served by one worker, without a transfer
    overlap: Mapping[str, int] = {}  # incarnation -> leading blocks that it holds already
    session: str = ""  # requests of one session are better served by one worker
    draws: tuple[float, float] = (0.0, 0.0)  # random numbers in [0, 1), for policies that want some
    targets: Targets = Targets()

    def num_lacking(self, worker: Candidate) -> int:
        """Tokens that the worker has to compute: the last one in any case."""
        found = self.overlap.get(worker.incarnation)
        if not found:
            return self.num_tokens
        most = (self.num_tokens - 1) // worker.block_size
        return self.num_tokens - min(found, most) * worker.block_size


Work = tuple[int, int]  # on some cores: tokens queued, sequences on decode workers


class Fleet(NamedTuple):
    """What is known of all workers together: for those that have measured nothing yet, 0 where nobody has;
    and for those that share their cores."""

    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    seats: Mapping[str, Work] = {}  # none where nobody shares


class Snapshot(NamedTuple):
    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]
    expects_prefill: bool  # there have been prefill workers, or there should be
    allows_fallback: bool  # decode workers may stand in for them
    fleet: Fleet = Fleet()


class Choice(NamedTuple):
    prefill: str | None
    decode: str
    fallback: bool = False  # no prefill worker, though there should be one


def fleet_of(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Fleet:
    workers = [*prefill, *decode]
    speeds = [speed for worker in workers if (speed := worker.pace.prefill_tokens_per_s)]
    links = [link for worker in workers if (link := worker.mean_link)]
    seats: dict[str, Work] = {}
    if len({worker.seat for worker in workers}) < len(workers):
        for share, has_streams in ((prefill, False), (decode, True)):
            for worker in share:
                queued, streams = seats.get(worker.seat, (0, 0))
                streams += worker.num_sequences if has_streams else 0
                seats[worker.seat] = (queued + worker.queued_tokens, streams)
        seats.pop("", None)
    return Fleet(sum(speeds) / max(1, len(speeds)), sum(links) / max(1, len(links)), seats)
