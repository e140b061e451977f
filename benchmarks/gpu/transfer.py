"""Blocks from one process to another, the caches of both on the device: by ZeroMQ through pinned memory, and
by UCX from where they are to where they shall be."""

import asyncio
import multiprocessing
import os
import queue
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Control
from typing import NamedTuple

import torch

from common import gpu
from common.cache import Cache, block_bytes_of, make_layout
from common.config import TransferConfig
from common.device_blocks import DeviceBlocks
from common.loop_thread import LoopThread
from common.messages import DecodeTarget, Generate, Handover, Layout, Sampling
from common.model_config import ModelConfig
from common.roster import Reservation
from common.sequence import Sequence
from kv_transfer import transport
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Outcome, Sender

BLOCK_SIZE = 16
TIMEOUT_S = 120.0
ROUNDS = 3  # the first one pins memory and maps the other's


class Shelf:
    """A cache of one prompt, in place of an engine on either side; backwards at the receiver."""

    def __init__(self, layout: Layout, num_blocks: int, device: torch.device, is_backwards: bool) -> None:
        self.cache = Cache(layout, num_blocks, device, staged=True)
        order = range(num_blocks)
        self.block_ids = list(reversed(order) if is_backwards else order)

    @property
    def on_device(self) -> "Shelf":
        return self

    def lend(
        self, sequence: Sequence, first: int, count: int, layers: range | None = None
    ) -> list[memoryview]:
        return self.cache.read(self.block_ids[first : first + count], layers)

    def lend_in_place(self, sequence: Sequence, first: int, count: int) -> DeviceBlocks:
        return self.cache.in_place(self.block_ids[first : first + count])

    def take_back(self, sequence: Sequence) -> None:
        pass

    def reserve(self, num_tokens: int, block_hashes: tuple[bytes, ...]) -> Reservation:
        return Reservation(num_tokens, block_hashes, self.block_ids, 0)

    def landing_views(
        self, reservation: Reservation, first: int, count: int, layers: range | None = None
    ) -> list[memoryview]:
        return self.cache.landing(self.block_ids[first : first + count], layers)

    def landing_in_place(self, reservation: Reservation, first: int, count: int) -> DeviceBlocks:
        return self.cache.in_place(self.block_ids[first : first + count])

    def landed(
        self,
        reservation: Reservation,
        first: int,
        count: int,
        views: list[memoryview],
        layers: range | None = None,
    ) -> None:
        self.cache.landed(self.block_ids[first : first + count], views, layers)

    def cancel(self, reservation: Reservation) -> None:
        pass


class Plan(NamedTuple):
    address: str
    layout: Layout
    num_blocks: int
    device: torch.device

    def shelf(self, is_backwards: bool) -> Shelf:
        return Shelf(self.layout, self.num_blocks, self.device, is_backwards)


class Moved(NamedTuple):
    seconds: float
    is_right: bool


def move(plan: Plan) -> Moved:
    """One prompt, from Offer to Landed. Raises ``ConnectionError`` or ``TimeoutError`` when it does not
    arrive."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, plan), daemon=True)
    process.start()
    theirs.close()
    try:
        source = plan.shelf(is_backwards=False)
        source.cache.data.view(torch.uint8).random_(0, 256)
        gpu.wait(plan.device)
        seconds = send(plan, source, DecodeTarget(_answer(ours), "d"))
        checksum = source.cache.in_place(source.block_ids).checksum()
        ours.send(None)
        return Moved(seconds, _answer(ours) == str(checksum))
    finally:
        ours.close()  # tells the other side to end
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()


def _answer(control: Control) -> str:
    if not control.poll(TIMEOUT_S):
        raise TimeoutError("the receiving process does not answer")
    return str(control.recv())


def send(plan: Plan, source: Shelf, target: DecodeTarget) -> float:
    loop = LoopThread("transfers")
    loop.call(gpu.use_beside_steps, plan.device)
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    block_bytes = source.cache.block_bytes
    sender = Sender(source, TransferConfig(), "p", plan.layout, block_bytes, outcomes.put)
    try:
        for number in range(ROUNDS):
            tokens = (0,) * (plan.num_blocks * BLOCK_SIZE)
            generate = Generate(str(number), 0, tokens, len(tokens), "x", Sampling(max_tokens=2), target)
            sequence = Sequence.from_generate(generate, handoff=True)
            started = time.perf_counter()
            loop.call(sender.offer, generate, sequence)
            loop.call(sender.hand_over, sequence.key, (0,), (), {})
            outcome = outcomes.get(timeout=TIMEOUT_S)
            seconds = time.perf_counter() - started
            if outcome.error is not None:
                raise ConnectionError(outcome.error.message)
        return seconds
    finally:
        asyncio.run_coroutine_threadsafe(sender.close(), loop.loop).result(TIMEOUT_S)
        loop.close()


def receive(control: Control, plan: Plan) -> None:
    asyncio.run(_receive(control, plan))


async def _receive(control: Control, plan: Plan) -> None:
    """Until the other side has closed ``control``; whenever it asks, tell the checksum of what is here."""
    gpu.use_beside_steps(plan.device)
    shelf, ended = plan.shelf(is_backwards=True), asyncio.Event()

    def adopt(reservation: Reservation, handover: Handover) -> None:
        pass

    def hear() -> None:
        try:
            control.recv()
            control.send(str(shelf.cache.in_place(shelf.block_ids).checksum()))
        except (EOFError, OSError):
            ended.set()

    receiver = Receiver(shelf, TransferConfig(), "d", plan.layout, shelf.cache.block_bytes, adopt)
    listener = await transport.listen(plan.address, receiver.serve)
    control.send(listener.address)
    loop = asyncio.get_running_loop()
    loop.add_reader(control.fileno(), hear)
    try:
        async with asyncio.timeout(2 * TIMEOUT_S):
            await ended.wait()
    finally:
        loop.remove_reader(control.fileno())
        await listener.close()


def pieces(model: ModelConfig, dtype: str, num_blocks: int, device: torch.device) -> Iterator[Iterator[str]]:
    """Rows of a table: what, figure."""
    layout = make_layout("random", dtype, model.num_layers, model.num_kv_heads, model.head_dim, BLOCK_SIZE)
    addresses = {"zmq+ipc": f"zmq+ipc://@baton-gpu-{os.getpid()}", "ucx": "ucx://127.0.0.1:0"}
    if "ucx" not in transport.available():
        yield iter(("| between processes by ucx: left out, the package ucxx is missing | |",))
        del addresses["ucx"]
    for name, address in addresses.items():
        yield _lines(name, Plan(address, layout, num_blocks, device))


def _lines(name: str, plan: Plan) -> Iterator[str]:
    moved = move(plan)
    num_bytes = plan.num_blocks * block_bytes_of(plan.layout)
    tokens, milliseconds = plan.num_blocks * BLOCK_SIZE, moved.seconds * 1e3
    yield f"| between processes by {name}: {tokens} tokens, ms | {milliseconds:.2f} |"
    yield f"| between processes by {name}, GB/s | {num_bytes / moved.seconds / 1e9:.2f} |"
    assert moved.is_right, f"by {name} comes something else than was sent"
