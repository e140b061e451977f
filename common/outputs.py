"""From what an engine reports to what a proxy is told."""

import os

import torch

from common.engine import Engine
from common.messages import Histogram, Role, Status, Tokens
from common.sequence import StepOutput
from common.timings import timings_of
from common.usage import Usage


def tokens_of(output: StepOutput) -> Tokens:
    """To be called in the engine's thread: the sequence goes on growing."""
    sequence = output.sequence
    is_first = sequence.num_output_tokens == len(output.token_ids)
    tells_timings = output.finish_reason is not None or is_first
    return Tokens(
        request_id=sequence.key.request_id,
        attempt=sequence.key.attempt,
        start=sequence.num_output_tokens - len(output.token_ids),
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        error=output.error,
        num_cached_tokens=sequence.num_cached_tokens,
        timings=timings_of(sequence) if tells_timings else {},
        prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
    )


def usage_of(engine: Engine) -> Usage:
    device = engine.cache.device
    return Usage(str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "")


def status_of(
    engine: Engine,
    incarnation: str,
    name: str,
    role: Role,
    address: str,
    draining: bool,
    counters: dict[str, float],
    histograms: dict[str, Histogram],
    usage: Usage,
    links: dict[str, float] | None = None,
) -> Status:
    if not engine.alive:
        raise RuntimeError("the engine has ended: this worker serves nothing any more")
    return Status(
        incarnation=incarnation,
        name=name,
        role=role,
        address=address,
        pid=os.getpid(),
        layout=engine.layout,
        model=engine.model,
        load=engine.load(),
        draining=draining,
        max_sequence_tokens=engine.max_sequence_tokens,
        counters=engine.counters() | counters | usage.counters(),
        gauges=usage.gauges(),
        histograms=engine.histograms() | histograms,
        pace=engine.pace(),
        block_bytes=engine.cache.block_bytes,
        links=links or {},
        locality=usage.locality,
        seat=usage.seat,
    )
