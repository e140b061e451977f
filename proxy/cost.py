"""What a request would cost on each pair of workers, in seconds, from what the workers have measured.

    TTFT      = queue on the cores of whoever prefills + a step there + tokens that its cache lacks
    transfer  = blocks that the decode worker lacks, over the link between the two, and a step to join
    computing = tokens that its cache lacks once more, times ``RECOMPUTING``: they take time from prompts
                that come later, and room from what these would find
    crowding  = a step for every sequence on the decode worker
    delay     = what the streams on these cores lose while the prompt is computed

The cost is their sum. Transfers are hidden by the prefill in part; how much is not known here, so all counts.
A decode worker alone is a pair without a transfer that delays its own streams, so that short prompts, and
those it knows already, stay where they are decoded. Where cores are few, prefill workers share them with
decode workers: such a pair delays their streams as well, and its queue is that of all who have these cores.

A decode worker may only prefill where a step with the prompt in it keeps the inter-token target:
``Targets.itl_s``, or without one some ordinary steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

from proxy.fleet import Candidate, Fleet, Need, Work

RECOMPUTING = 1.0
NUM_BEST = 4  # of each side are looked at as pairs
LINK_BYTES_PER_S = 1e9  # of a link not measured yet, between workers that share all labels
DISTANCE = 4.0  # how many times slower it is taken to be for every label that differs
MOST_STEPS = 3.0  # ordinary steps that a step with a prompt in it may take, where there is no target,
MOST_STEP_S = 0.1  # and seconds
UNKNOWN_TOKENS_PER_S = 2000.0  # before anybody has measured anything


class Prediction(NamedTuple):
    ttft_s: float
    itl_s: float  # while the prompt is computed, of the streams beside it, and of its own
    transfer_s: float
    cost_s: float
    num_cached: int
    is_measured: bool  # by the worker that is to prefill, or by others; else it is a guess


def cheapest_pair(
    prefill: Sequence[Candidate], decode: Sequence[Candidate], need: Need, fleet: Fleet
) -> tuple[Candidate, Candidate, float]:
    """The pair and its cost; among equals the one used longest ago. Both sequences must not be empty."""
    first = [(prefill_cost(worker, need, fleet), worker.last_used, i) for i, worker in enumerate(prefill)]
    second = [(decode_cost(worker, need), worker.last_used, j) for j, worker in enumerate(decode)]
    first, second = sorted(first)[:NUM_BEST], sorted(second)[:NUM_BEST]
    pairs = [
        (cost_p + cost_d + transfer_time(prefill[i], decode[j], need, fleet), used_p + used_d, i, j)
        for cost_p, used_p, i in first
        for cost_d, used_d, j in second
    ]
    pair_cost, _, i, j = min(pairs)
    return prefill[i], decode[j], pair_cost


def cheapest_alone(
    decode: Sequence[Candidate], need: Need, fleet: Fleet, keeps_target: bool = True
) -> tuple[Candidate, float] | None:
    """The decode worker to do both halves and its cost; ``keeps_target``: only one that may."""
    allowed = [w for w in decode if not keeps_target or may_prefill(w, need, fleet)]
    if not allowed:
        return None
    costs = [(cost_alone(worker, need, fleet), worker.last_used, i) for i, worker in enumerate(allowed)]
    cost, _, index = min(costs)
    return allowed[index], cost


def predict(prefill: Candidate | None, decode: Candidate, need: Need, fleet: Fleet) -> Prediction:
    step_s = decode.pace.step_s
    if prefill is None:
        cost, transfer_s = cost_alone(decode, need, fleet), 0.0
        itl_s = step_s + compute_time(decode, need, fleet)
    else:
        transfer_s = transfer_time(prefill, decode, need, fleet)
        cost = prefill_cost(prefill, need, fleet) + decode_cost(decode, need) + transfer_s
        itl_s = step_s
    worker = prefill or decode
    ttft_s = time_to_first_token(worker, need, fleet)
    num_cached = need.num_tokens - need.num_lacking(worker)
    return Prediction(ttft_s, itl_s, transfer_s, cost, num_cached, bool(fleet.tokens_per_s))


def may_prefill(decode: Candidate, need: Need, fleet: Fleet) -> bool:
    """Whether a step with the prompt in it keeps the inter-token target. Unknown: no."""
    step_s = decode.pace.step_s
    if not step_s:
        return False
    most_s = need.targets.itl_s or min(MOST_STEPS * step_s, MOST_STEP_S)
    return step_s + compute_time(decode, need, fleet) <= most_s


def compute_time(worker: Candidate, need: Need, fleet: Fleet) -> float:
    return need.num_lacking(worker) / speed_of(worker, fleet)


def time_to_first_token(worker: Candidate, need: Need, fleet: Fleet) -> float:
    num_queued, _ = work_there(worker, fleet)
    num_tokens = num_queued + need.num_lacking(worker)
    return worker.pace.step_s + num_tokens / speed_of(worker, fleet)


def prefill_cost(worker: Candidate, need: Need, fleet: Fleet, num_streams: int = 0) -> float:
    """``num_streams``: its own, which it would delay."""
    num_queued, num_streams = work_there(worker, fleet, num_streams)
    num_tokens = num_queued + (1 + RECOMPUTING + num_streams) * need.num_lacking(worker)
    return worker.pace.step_s + num_tokens / speed_of(worker, fleet)


def decode_cost(worker: Candidate, need: Need) -> float:
    return worker.pace.step_s * worker.num_sequences


def cost_alone(worker: Candidate, need: Need, fleet: Fleet) -> float:
    return prefill_cost(worker, need, fleet, worker.num_sequences) + decode_cost(worker, need)


def work_there(worker: Candidate, fleet: Fleet, num_streams: int = 0) -> Work:
    """On its cores; ``num_streams`` are its own."""
    return fleet.seats.get(worker.seat) or (worker.queued_tokens, num_streams)


def speed_of(worker: Candidate, fleet: Fleet) -> float:
    """Tokens per second in prefill. A worker that was slow once must get a chance to show that it is not."""
    usual = fleet.tokens_per_s or UNKNOWN_TOKENS_PER_S
    speed = worker.pace.prefill_tokens_per_s or usual
    return speed if 2 * speed > usual else usual / 2


def transfer_time(prefill: Candidate, decode: Candidate, need: Need, fleet: Fleet) -> float:
    num_lacking = -(-need.num_tokens // decode.block_size) - need.overlap.get(decode.incarnation, 0)
    num_bytes = max(0, num_lacking) * decode.block_bytes
    speed = prefill.links.get(decode.incarnation) or _link_speed(prefill, decode, fleet)
    return num_bytes / speed + decode.pace.step_s


def _link_speed(prefill: Candidate, decode: Candidate, fleet: Fleet) -> float:
    speed = fleet.bytes_per_s or LINK_BYTES_PER_S
    if prefill.locality:
        other = decode.locality
        speed /= DISTANCE ** sum(other.get(name) != value for name, value in prefill.locality.items())
    return speed
