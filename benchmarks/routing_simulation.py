"""Workers that are clocks and caches, and the proxy's own registry, index and router in front of them.

Virtual time. A prefill worker computes one prompt after the other at a measured speed; then its decode worker
gives a token a step. Caches hold whole blocks and evict the least recently used; what a prompt finds in one
is what a real worker would find: its longest known beginning. Workers report at every arrival, so that
routing decides on news as fresh as a real proxy has them right after a heartbeat.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.messages import BlocksRemoved, BlocksStored, Layout, Load, ModelInfo, Pace, Role, Status
from proxy.fleet import Choice, Need
from proxy.registry import Registry
from proxy.router import Router

BLOCK_SIZE = 16
LAYOUT = Layout(1, "simulated", "bfloat16", 30, 3, 64, BLOCK_SIZE)
MODEL = ModelInfo("simulated", "simulated", 49152, 131072)
BLOCK_BYTES = 2 * 30 * 3 * 64 * BLOCK_SIZE * 2
LINK_BYTES_PER_S = 1e9


class Turn(NamedTuple):
    """One request of a trace."""

    at_s: float
    hashes: tuple[bytes, ...]  # of its full blocks
    num_tokens: int
    num_output: int


class Speeds(NamedTuple):
    tokens_per_s: float
    step_s: float


class Simulated(NamedTuple):
    hit_rate: float
    ttfts_s: list[float]

    @property
    def mean_s(self) -> float:
        return sum(self.ttfts_s) / len(self.ttfts_s)

    def percentile_s(self, share: float) -> float:
        return sorted(self.ttfts_s)[int(share * (len(self.ttfts_s) - 1))]


class _Worker:
    def __init__(self, role: Role, number: int, num_blocks: int, speeds: Speeds) -> None:
        self.role = role
        self.name = f"{role}-{number}"
        self.num_blocks = num_blocks
        self.speeds = speeds
        self.free_at = 0.0  # prefill: when the last prompt that was sent there is computed
        self.num_running = 0
        self._cache: OrderedDict[bytes, None] = OrderedDict()

    @property
    def peer(self) -> bytes:
        return self.name.encode()

    def num_known(self, hashes: Sequence[bytes]) -> int:
        count = 0
        for block_hash in hashes:
            if block_hash not in self._cache:
                break
            count += 1
        return count

    def store(self, hashes: Sequence[bytes]) -> Iterator[BlocksStored | BlocksRemoved]:
        """Returns the news of it. Of a prefix later blocks are evicted first."""
        new = tuple(name for name in hashes if name not in self._cache)
        for name in reversed(hashes):
            self._cache[name] = None
            self._cache.move_to_end(name)
        removed = []
        while len(self._cache) > self.num_blocks:
            removed.append(self._cache.popitem(last=False)[0])
        if removed:
            yield BlocksRemoved(tuple(removed))
        yield BlocksStored(new)

    def status(self, now: float) -> Status:
        queued = round(max(0.0, self.free_at - now) * self.speeds.tokens_per_s)
        load = Load(0, self.num_running, queued, self.num_blocks, self.num_blocks, 0)
        return Status(
            incarnation=self.name,
            name=self.name,
            role=self.role,
            address=self.name,
            pid=1,
            layout=LAYOUT,
            model=MODEL,
            load=load,
            pace=Pace(*self.speeds),
            block_bytes=BLOCK_BYTES,
        )


class Simulation:
    def __init__(self, router: Router, num_workers: int, num_blocks: int, speeds: Speeds) -> None:
        self._router = router
        self._registry = Registry(dead_after_s=1e9)
        self._chance = random.Random(1)
        roles: tuple[Role, ...] = ("prefill", "decode")
        workers = [_Worker(role, n, num_blocks, speeds) for role in roles for n in range(num_workers)]
        self._workers = {worker.name: worker for worker in workers}
        self._events: list[tuple[float, int, str, Sequence[bytes], int]] = []  # what workers finish, and when
        self._num_events = 0
        for worker in workers:
            self._registry.hear(worker.peer, worker.status(0.0))
            self._registry.hear_blocks(worker.peer, BlocksStored((), is_first=True))

    def run(self, turns: Sequence[Turn]) -> Simulated:
        ttfts, num_hits = [], 0
        for turn in turns:
            while self._events and self._events[0][0] <= turn.at_s:
                self._finish(*heapq.heappop(self._events))
            for worker in self._workers.values():
                self._registry.hear(worker.peer, worker.status(turn.at_s))
            cached, ttft = self._serve(turn)
            num_hits += cached
            ttfts.append(ttft)
        return Simulated(num_hits / sum(turn.num_tokens for turn in turns), ttfts)

    def _choose(self, turn: Turn) -> Choice:
        overlap = self._registry.index.overlap(turn.hashes)
        draws = self._chance.random(), self._chance.random()
        need = Need(turn.num_tokens, turn.num_tokens + turn.num_output, overlap=overlap, draws=draws)
        choice = self._router.choose(self._registry.snapshot(), need)
        assert choice is not None
        return choice

    def _serve(self, turn: Turn) -> tuple[int, float]:
        """Cached tokens, and seconds to the first token."""
        choice = self._choose(turn)
        first, decode = self._workers[choice.prefill or choice.decode], self._workers[choice.decode]
        found = min(first.num_known(turn.hashes), (turn.num_tokens - 1) // BLOCK_SIZE)
        speeds = first.speeds
        computing_s = speeds.step_s + (turn.num_tokens - found * BLOCK_SIZE) / speeds.tokens_per_s
        first.free_at = max(first.free_at, turn.at_s) + computing_s
        decode.num_running += 1
        self._note(first.free_at, first.name, turn.hashes, 0)
        lacking = len(turn.hashes) - decode.num_known(turn.hashes)
        landed_at = first.free_at + (lacking * BLOCK_BYTES / LINK_BYTES_PER_S if choice.prefill else 0.0)
        self._note(landed_at + turn.num_output * speeds.step_s, decode.name, turn.hashes, 1)
        for name in {first.name, decode.name}:
            worker = self._registry.find(name.encode())
            assert worker is not None
            self._registry.charge(worker, "r", 0, 0)  # notes whose turn it was
            self._registry.settle(worker, "r")
        return found * BLOCK_SIZE, first.free_at - turn.at_s

    def _note(self, at_s: float, name: str, hashes: Sequence[bytes], num_ended: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, name, hashes, num_ended))

    def _finish(self, at_s: float, _: int, name: str, hashes: Sequence[bytes], num_ended: int) -> None:
        worker = self._workers[name]
        worker.num_running -= num_ended
        for news in worker.store(hashes):
            self._registry.hear_blocks(worker.peer, news)


def best_hit_rate(turns: Sequence[Turn]) -> float:
    """Of one cache without end, that knows every prompt as soon as it was sent."""
    known: set[bytes] = set()
    num_hits = 0
    for turn in turns:
        for block_hash in turn.hashes[: (turn.num_tokens - 1) // BLOCK_SIZE]:
            if block_hash not in known:
                break
            num_hits += BLOCK_SIZE
        known.update(turn.hashes)
    return num_hits / sum(turn.num_tokens for turn in turns)
