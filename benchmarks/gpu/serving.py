"""The whole engine on a GPU: how fast it prefills, decodes, and hands over to another one."""

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.gpu import timing
from common import gpu
from common.cache import Cache, make_layout
from common.config import EngineConfig
from common.engine import Engine, Reservation
from common.graphs import RecordedModel, recorder
from common.messages import ModelInfo, Sampling
from common.model import Model
from common.sequence import Sequence, SequenceKey
from common.staging import BlockOps
from kernels import cpu, specification
from kernels.triton import blocks
from kv_transfer import memory

BLOCK_SIZE = 16
STEP_TOKENS = 2048
READ_AT_ONCE = 8  # blocks
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Load:
    prompt_tokens: int
    batches: tuple[int, ...]
    context: int
    steps: int


def make_engine(model: Model, load: Load, is_recorded: bool, num_seqs: int) -> Engine:
    gc.collect()  # engines before this one refer to themselves, and their caches are large
    config, sizes = model.config, (model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)
    dtype = str(model.dtype).removeprefix("torch.")
    longest = max(load.prompt_tokens, load.context + most_tokens(load, num_seqs)) + BLOCK_SIZE
    num_blocks = num_seqs * -(-longest // BLOCK_SIZE) + 1
    layout = make_layout("random", dtype, *sizes, BLOCK_SIZE)
    block_ops: BlockOps = specification
    if model.ops is not cpu:
        block_ops = blocks
    cache = Cache(layout, num_blocks, model.device, staged=True, block_ops=block_ops)
    options = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
    )
    runner: Model | RecordedModel = model
    if is_recorded:
        with torch.inference_mode():
            runner = RecordedModel(model, cache.layers, num_blocks, num_seqs, longest, recorder())
    return Engine(runner, cache, ModelInfo("random", "random", config.vocab_size, longest), options, ())


def add(engine: Engine, name: str, num_tokens: int, max_tokens: int, handoff: bool = False) -> Sequence:
    vocab = engine.model.vocab_size
    tokens = [(31 * position + len(name)) % vocab for position in range(num_tokens)]
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    sequence = Sequence(SequenceKey(name, 0), tokens, num_tokens, sampling, NEVER, handoff=handoff)
    engine.add(sequence)
    return sequence


def step(engine: Engine) -> None:
    """Raises ``RuntimeError`` where a sequence ends with an error: what is quick because it failed is not
    measured, nor waited for."""
    for output in engine.step():
        if output.error is not None:
            raise RuntimeError(output.error.message)


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        step(engine)


def drain(engine: Engine) -> None:
    while engine.load().num_running + engine.load().num_waiting:
        step(engine)


def prefill_tokens_per_s(model: Model, load: Load) -> float:
    engine = make_engine(model, load, False, 1)
    for name in ("warm-up", "measured"):
        add(engine, name, load.prompt_tokens, 1)
        seconds = timing.elapsed(lambda: drain(engine), model.device)
    return load.prompt_tokens / seconds


def most_tokens(load: Load, batch: int) -> int:
    """That a sequence may give: some while the prompts of others are still computed."""
    return load.steps + 8 + 2 * batch * load.context // STEP_TOKENS


def decoding(model: Model, load: Load, batch: int, is_recorded: bool) -> Engine:
    """An engine whose next steps all have a token for each of ``batch`` sequences."""
    engine = make_engine(model, load, is_recorded, batch)
    sequences = [add(engine, f"r{i}", load.context, most_tokens(load, batch)) for i in range(batch)]
    while min(sequence.num_output_tokens for sequence in sequences) < 3:
        step(engine)
    return engine


def step_s(engine: Engine, load: Load) -> float:
    count = engine.load().num_running
    seconds = timing.elapsed(partial(steps, engine, load.steps), engine.cache.device)
    assert engine.load().num_running == count, "a sequence has ended before its time was taken"
    return seconds / load.steps


@dataclass(frozen=True, slots=True)
class Beside:
    """Decode steps alone, and while another thread reads blocks all the time, as a sender would."""

    alone_s: float
    step_s: float
    bytes_per_s: float


def beside_reading(model: Model, load: Load, batch: int, is_recorded: bool) -> Beside:
    half = replace(load, steps=load.steps // 2)
    engine = decoding(model, load, batch, is_recorded)
    block_ids = list(range(0, min(engine.cache.num_blocks, 2 * READ_AT_ONCE), 2))  # no two side by side
    engine.cache.read(block_ids)  # compiles, and pins memory
    alone_s, stop, counts = step_s(engine, half), threading.Event(), [0]

    def read() -> None:
        gpu.use_beside_steps(engine.cache.device)
        while not stop.is_set():
            engine.cache.read(block_ids)
            counts[0] += len(block_ids)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        started = time.perf_counter()
        disturbed_s = step_s(engine, half)
        seconds = time.perf_counter() - started
    finally:
        stop.set()
        reader.join()
    return Beside(alone_s, disturbed_s, counts[0] * engine.cache.block_bytes / seconds)


@dataclass(frozen=True, slots=True)
class HandOver:
    seconds: float
    num_bytes: int
    is_right: bool  # the tokens are those of one engine alone


def hand_over(model: Model, load: Load) -> HandOver:
    """Between two engines on this device, by way of main memory, as ZeroMQ would carry it."""
    alone, source, target = (make_engine(model, load, False, 1) for _ in range(3))
    whole = add(alone, "r", load.context, 6)
    drain(alone)
    for _ in range(2):  # the first time, memory is pinned
        half = add(source, "r", load.context, 6, handoff=True)
        drain(source)
        reservation = target.reserve(load.context, tuple(half.block_hashes))
        assert reservation is not None
        seconds = timing.elapsed(partial(move, source, half, target, reservation), model.device)
        rest = Sequence(half.key, half.token_ids, half.num_prompt_tokens, half.sampling, NEVER)
        target.adopt(reservation, rest)
        drain(target)
    num_bytes = -(-load.context // BLOCK_SIZE) * source.cache.block_bytes
    return HandOver(seconds, num_bytes, rest.token_ids == whole.token_ids)


def move(source: Engine, sequence: Sequence, target: Engine, reservation: Reservation) -> None:
    """All blocks of a prompt from one engine to the other."""
    count = -(-sequence.num_prompt_tokens // BLOCK_SIZE)
    views = target.landing_views(reservation, 0, count)
    lent = source.lend(sequence, 0, count)
    assert lent is not None
    memory.copy(lent[0], views[0])
    target.landed(reservation, 0, count, views)
    source.take_back(sequence)
    source.release(sequence.key)


def pieces(name: str, model: Model, load: Load, is_gpu: bool) -> Iterator[Iterator[str]]:
    """Rows of a table: what, figure. What takes longest comes last."""
    yield prefill_lines(name, model, load)
    yield hand_over_lines(name, model, load)
    for batch in load.batches:
        yield decode_lines(name, model, load, batch, is_gpu)
    yield beside_lines(name, model, load, is_gpu)


def prefill_lines(name: str, model: Model, load: Load) -> Iterator[str]:
    rate = prefill_tokens_per_s(model, load)
    yield f"| {name}: prefill of {load.prompt_tokens} tokens, tokens/s | {rate:,.0f} |"


def decode_lines(name: str, model: Model, load: Load, batch: int, is_gpu: bool) -> Iterator[str]:
    launched = step_s(decoding(model, load, batch, False), load)
    yield f"| {name}: TPOT at batch {batch}, ms, launched one by one | {launched * 1e3:.2f} |"
    if is_gpu:
        recorded = step_s(decoding(model, load, batch, True), load)
        yield f"| {name}: TPOT at batch {batch}, ms, recorded | {recorded * 1e3:.2f} |"
        yield f"| {name}: decode at batch {batch}, tokens/s | {batch / recorded:,.0f} |"


def beside_lines(name: str, model: Model, load: Load, is_gpu: bool) -> Iterator[str]:
    beside = beside_reading(model, load, load.batches[len(load.batches) // 2], is_gpu)
    slower = beside.step_s / beside.alone_s
    yield f"| {name}: TPOT while blocks are read, of that while none are | {slower:.2f} |"
    yield f"| {name}: read meanwhile, GB/s | {beside.bytes_per_s / 1e9:.2f} |"


def hand_over_lines(name: str, model: Model, load: Load) -> Iterator[str]:
    moved = hand_over(model, load)
    rate = moved.num_bytes / moved.seconds / 1e9
    yield f"| {name}: hand-over of {load.context} tokens, ms | {moved.seconds * 1e3:.1f} |"
    yield f"| {name}: hand-over, GB/s | {rate:.2f} |"
    assert moved.is_right, "after the hand-over come other tokens than without it"
