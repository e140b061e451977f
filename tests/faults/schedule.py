"""Which faults come when: drawn from a seed, so that a run can be had again."""

import random
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    KILL = "kill"  # SIGKILL, and a new process at once
    STOP = "stop"  # SIGSTOP, and SIGCONT after a while
    CUT = "cut"  # open transfer connections are reset or closed
    CUT_CONTROL = "cut control"  # so is a worker's connection to the proxy
    FLIP = "flip"  # bytes of transfers are altered
    FLIP_CONTROL = "flip control"  # bytes between a worker and the proxy
    STALL_CONTROL = "stall control"
    SLOW = "slow"  # transfers crawl
    STALL = "stall"  # transfers stand still


class Fault(NamedTuple):
    at_s: float
    kind: Kind
    target: str  # name of a worker
    lasts_s: float = 0.0


LASTS_S = {
    Kind.STOP: (0.3, 3.0),
    Kind.FLIP: (0.5, 2.0),
    Kind.SLOW: (0.5, 2.0),
    Kind.STALL: (0.5, 4.0),
    Kind.FLIP_CONTROL: (0.5, 2.0),
    Kind.STALL_CONTROL: (0.3, 3.0),
}
# Where transfers do not go by a relay.
WITHOUT_RELAY = (Kind.STOP, Kind.CUT_CONTROL, Kind.FLIP_CONTROL, Kind.STALL_CONTROL)
OTHERS = (*WITHOUT_RELAY, Kind.CUT, Kind.FLIP, Kind.SLOW, Kind.STALL)


def draw(
    seed: int,
    seconds: float,
    workers: Sequence[str],
    kill_every_s: float,
    others_every_s: float,
    kinds: Sequence[Kind] = OTHERS,
) -> list[Fault]:
    """Kills at a steady pace, in turns that leave no worker out, and between them the other kinds by chance.
    Nothing starts in the last fifth of the time."""
    source = random.Random(seed)
    end = 0.8 * seconds
    kills = _kills(source, end, workers, kill_every_s)
    others = _others(source, end, workers, others_every_s, kinds)
    return sorted(kills + others, key=lambda fault: fault.at_s)


def _kills(source: random.Random, end: float, workers: Sequence[str], every_s: float) -> list[Fault]:
    kills: list[Fault] = []
    turn: list[str] = []
    while (at := every_s * (len(kills) + 1)) < end:
        if not turn:
            turn = source.sample(workers, len(workers))
        kills.append(Fault(at, Kind.KILL, turn.pop()))
    return kills


def _others(
    source: random.Random, end: float, workers: Sequence[str], every_s: float, kinds: Sequence[Kind]
) -> list[Fault]:
    faults: list[Fault] = []
    at = source.expovariate(1 / every_s)
    while at < end:
        kind = source.choice(kinds)
        targets = workers if kind in WITHOUT_RELAY else [name for name in workers if name.startswith("d")]
        lasts_s = source.uniform(*LASTS_S[kind]) if kind in LASTS_S else 0.0
        faults.append(Fault(at, kind, source.choice(targets), lasts_s))
        at += source.expovariate(1 / every_s)
    return faults
