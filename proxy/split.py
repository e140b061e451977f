"""Where a request's time went, from marks of this proxy's clock and durations that workers tell.

The segments fill the time from arrival to the last token without gaps. The split of the same time says what
it was spent on:

    kernel_s      computing steps with tokens of the request: the model and the choice of tokens
    cache_s       planning these steps and preparing their blocks
    transfer_s    the part of the hand-over that prefill did not hide
    scheduling_s  all the rest: the proxy, queues, steps of others, messages on their way, failed attempts

Only the rest is not measured by itself, so the four add up to the latency.
"""

from collections.abc import Iterable

from proxy.attempt import Attempt
from proxy.record import Segment
from proxy.request import Request


def segments_of(request: Request, arrived_at: float, ended_at: float) -> tuple[Segment, ...]:
    attempt = request.attempt
    if attempt is None:
        return _in_a_row([("route", ended_at - arrived_at)])
    parts = [("route", request.dispatched_at - arrived_at)]
    if request.num_attempts > 1:
        parts.append(("retry", attempt.began_at - request.dispatched_at))
    return _in_a_row(parts + _parts_of(attempt, ended_at))


def split_of(request: Request, arrived_at: float, ended_at: float) -> dict[str, float]:
    """Empty for a request whose workers have not told how it ended."""
    attempt = request.attempt
    if attempt is None or not attempt.finished:
        return {}
    told, total_s = attempt.timings, ended_at - arrived_at
    kernel_s = told.get("prefill_kernel_s", 0.0) + told.get("decode_kernel_s", 0.0)
    cache_s = told.get("prefill_cache_s", 0.0) + told.get("decode_cache_s", 0.0)
    # Messages of two workers take different times, so what this proxy saw of the hand-over may be too long.
    transfer_s = min(
        attempt.exposed_s(ended_at), told.get("exposed_transfer_s", total_s), total_s - kernel_s - cache_s
    )
    scheduling_s = total_s - kernel_s - cache_s - transfer_s
    return {
        "kernel_s": kernel_s, "cache_s": cache_s, "transfer_s": transfer_s, "scheduling_s": scheduling_s
    }  # fmt: skip


def _parts_of(attempt: Attempt, ended_at: float) -> list[tuple[str, float]]:
    told = attempt.timings
    if not attempt.first_token_at:
        return [("queue", ended_at - attempt.began_at)]
    to_first_s = attempt.first_token_at - attempt.began_at
    prefill_s = min(told.get("prefill_s", to_first_s), to_first_s)
    parts = [("queue", to_first_s - prefill_s), ("prefill", prefill_s)]
    left_s = ended_at - attempt.first_token_at
    if attempt.prefill is not None:
        transfer_s = attempt.exposed_s(ended_at)
        wait_s = min(told.get("decode_wait_s", 0.0), left_s - transfer_s)
        parts += [("transfer", transfer_s), ("wait", wait_s)]
        left_s -= transfer_s + wait_s
    return [*parts, ("decode", left_s)]


def _in_a_row(parts: Iterable[tuple[str, float]]) -> tuple[Segment, ...]:
    segments, start_s = [], 0.0
    for name, seconds in parts:
        segments.append(Segment(name, start_s, seconds))
        start_s += seconds
    return tuple(segments)
