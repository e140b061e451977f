"""Which workers serve a request.

Whoever cannot hold it, or is to blame for its failures, is left out first; then a policy picks on each side.
With ``cost`` on both sides pairs are weighed as pairs, decode workers that do both halves among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy import cost
from proxy.fleet import Candidate, Choice, Fleet, Need, Snapshot, Targets
from proxy.policies import DECODE, PICKS, PREFILL

__all__ = ["MAX_BLAME", "Candidate", "Choice", "Need", "Router", "Snapshot", "Targets"]

MAX_BLAME = 2  # a worker blamed this much for failures of a request is its last resort

Disaggregate = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Router:
    """Policies by name: ``cost``, or one of ``policies.PICKS``."""

    prefill: str = "cost"
    decode: str = "cost"
    disaggregate: Disaggregate = "auto"  # auto: a decode worker also prefills what costs less there

    def choose(self, snapshot: Snapshot, need: Need) -> Choice | None:
        """None when nobody can serve the request now."""
        able = [w for w in snapshot.decode if need.max_total_tokens <= w.max_sequence_tokens]
        decode = _best_tier(able, need)
        if not decode:
            return None
        fleet = snapshot.fleet
        if snapshot.prefill and self.disaggregate == "never" and snapshot.allows_fallback:
            return Choice(None, self._decode_alone(decode, need, fleet).incarnation)
        able = [w for w in snapshot.prefill if w.trusted and need.num_tokens < w.max_sequence_tokens]
        prefill = _least_blamed(able, need)
        if prefill and (need.hands_over or not snapshot.allows_fallback):
            return self._pair(prefill, decode, need, fleet, snapshot.allows_fallback)
        if snapshot.expects_prefill and not snapshot.allows_fallback:
            return None
        alone = self._decode_alone(decode, need, fleet)
        return Choice(None, alone.incarnation, fallback=snapshot.expects_prefill)

    def predict(self, snapshot: Snapshot, need: Need, choice: Choice) -> cost.Prediction:
        prefill = next((w for w in snapshot.prefill if w.incarnation == choice.prefill), None)
        decode = next(w for w in snapshot.decode if w.incarnation == choice.decode)
        return cost.predict(prefill, decode, need, snapshot.fleet)

    def explain(self, snapshot: Snapshot, need: Need, choice: Choice) -> str:
        """Every pair with what it would cost, the choice marked; for logs."""
        lines = [f"{need.num_tokens} tokens by {self.prefill}/{self.decode}, {self.disaggregate}:"]
        for decode in snapshot.decode:
            for prefill in (None, *snapshot.prefill):
                pair = prefill and prefill.incarnation, decode.incarnation
                mark = "*" if pair == choice[:2] else " "
                told = cost.predict(prefill, decode, need, snapshot.fleet)
                first = prefill.name if prefill else "-"
                lines.append(
                    f"{mark} {first} > {decode.name}: cost {told.cost_s:.4f} s, TTFT {told.ttft_s:.4f} s, "
                    f"transfer {told.transfer_s:.4f} s, ITL {told.itl_s:.4f} s, {told.num_cached} cached"
                )
        return "\n".join(lines)

    def _pair(
        self,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        need: Need,
        fleet: Fleet,
        allows_alone: bool,
    ) -> Choice:
        if self.prefill == self.decode == "cost":
            first, second, pair_cost = cost.cheapest_pair(prefill, decode, need, fleet)
            if self.disaggregate == "auto" and allows_alone:
                alone = cost.cheapest_alone(decode, need, fleet)
                if alone is not None and alone[1] < pair_cost:
                    return Choice(None, alone[0].incarnation)
            return Choice(first.incarnation, second.incarnation)
        if self.prefill != "cost":
            prefill = [PICKS[self.prefill](prefill, need, PREFILL)]
        if self.decode != "cost":
            decode = [PICKS[self.decode](decode, need, DECODE)]
        first, second, _ = cost.cheapest_pair(prefill, decode, need, fleet)
        return Choice(first.incarnation, second.incarnation)

    def _decode_alone(self, decode: Sequence[Candidate], need: Need, fleet: Fleet) -> Candidate:
        if self.decode != "cost":
            return PICKS[self.decode](decode, need, DECODE)
        found = cost.cheapest_alone(decode, need, fleet, keeps_target=False)
        assert found is not None
        return found[0]


def _least_blamed(workers: list[Candidate], need: Need) -> list[Candidate]:
    if not need.blame or not workers:
        return workers
    blame = [need.blame.get(worker.incarnation, 0) for worker in workers]
    least = min(blame)
    if least >= MAX_BLAME:
        return []
    return [worker for worker, part in zip(workers, blame, strict=True) if part == least]


def _best_tier(workers: list[Candidate], need: Need) -> list[Candidate]:
    """A decode worker that failed, or is full, is better than none, so neither leaves it out for good."""
    best = [w for w in workers if w.trusted and _has_room(w, need) and not need.blame.get(w.incarnation)]
    if best or not workers:
        return best
    tiers = [_tier(worker, need) for worker in workers]
    least = min(tiers)
    return [worker for worker, tier in zip(workers, tiers, strict=True) if tier == least]


def _tier(worker: Candidate, need: Need) -> tuple[bool, int, bool]:
    return not worker.trusted, need.blame.get(worker.incarnation, 0), not _has_room(worker, need)


def _has_room(worker: Candidate, need: Need) -> bool:
    return worker.free_blocks * worker.block_size > need.num_tokens
