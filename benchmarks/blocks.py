"""Blocks through sender and receiver: what Baton's protocol costs on top of a transport.

A prompt's blocks go from a region of this process to one of another, once by the whole protocol (Offer,
Accept, Blocks with checksums, Credit, Handover, Landed) and once as bare messages of the same sizes on the
same transport, in turn."""

import asyncio
import queue
import time
from multiprocessing.connection import Connection as Control
from typing import NamedTuple

from benchmarks.pipes import REGION_BYTES, START_TIMEOUT_S, Answerer, Flow, Region, Transport
from common.config import TransferConfig
from common.loop_thread import LoopThread
from common.messages import PROTOCOL_VERSION, DecodeTarget, Generate, Handover, Layout, Sampling
from common.roster import Reservation
from common.sequence import Sequence
from kv_transfer import transport
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Outcome, Sender

BLOCK_SIZE = 16
BLOCK_BYTES = 360 << 10  # 16 tokens of the default model in bfloat16
LAYOUT = Layout(PROTOCOL_VERSION, "benchmark", "bfloat16", 30, 3, 64, BLOCK_SIZE)
INCARNATION = "receiver"
TIMEOUT_S = 60.0


class Shelf:
    """A region of memory cut into blocks, in place of an engine on either side. All are computed, so that
    whole ones travel."""

    on_device = None

    def __init__(self) -> None:
        self._region = Region().piece(REGION_BYTES)

    def lend(
        self, sequence: Sequence, first: int, count: int, layers: range | None = None
    ) -> list[memoryview]:
        return [self._region[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]]

    def take_back(self, sequence: Sequence) -> None:
        pass

    def reserve(self, num_tokens: int, block_hashes: tuple[bytes, ...]) -> Reservation:
        return Reservation(num_tokens, block_hashes, [], 0)

    def landing_views(
        self, reservation: Reservation, first: int, count: int, layers: range | None = None
    ) -> list[memoryview]:
        return [self._region[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]]

    def landed(
        self,
        reservation: Reservation,
        first: int,
        count: int,
        views: list[memoryview],
        layers: range | None = None,
    ) -> None:
        pass

    def cancel(self, reservation: Reservation) -> None:
        pass


class Handovers:
    """A sender here, a receiver in a process of its own."""

    def __init__(self, address: str, core: int) -> None:
        self._answerer = Answerer(serve_receiver, address, core)
        self._loop = LoopThread("transfers")
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._target = DecodeTarget(self._answerer.address, INCARNATION)
        self._sender = Sender(Shelf(), TransferConfig(), "sender", LAYOUT, BLOCK_BYTES, self._outcomes.put)
        self._number = 0

    def transfer(self, num_blocks: int) -> Flow:
        """One prompt, all of it computed already, from Offer to Landed. CPU time is of this side alone."""
        self._number += 1
        token_ids = (0,) * (num_blocks * BLOCK_SIZE)
        generate = Generate(
            request_id=str(self._number),
            attempt=0,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            proxy="benchmark",
            sampling=Sampling(max_tokens=2),
            decode=self._target,
        )
        sequence = Sequence.from_generate(generate, handoff=True)
        started, cpu = time.perf_counter(), time.process_time()
        self._loop.call(self._start, generate, sequence)
        outcome = self._outcomes.get(timeout=TIMEOUT_S)
        if outcome.error is not None:
            raise ConnectionError(outcome.error.message)
        return Flow(time.perf_counter() - started, time.process_time() - cpu)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._sender.close(), self._loop.loop).result(TIMEOUT_S)
        self._loop.close()
        self._answerer.close()

    def _start(self, generate: Generate, sequence: Sequence) -> None:
        self._sender.offer(generate, sequence)
        self._sender.hand_over(sequence.key, (0,), (), {})


def serve_receiver(control: Control, address: str) -> None:
    asyncio.run(_serve_receiver(control, address))


async def _serve_receiver(control: Control, address: str) -> None:
    ended = asyncio.Event()

    def adopt(reservation: Reservation, handover: Handover) -> None:
        pass

    receiver = Receiver(Shelf(), TransferConfig(), INCARNATION, LAYOUT, BLOCK_BYTES, adopt)

    async def serve(connection: transport.Connection) -> None:
        try:
            await receiver.serve(connection)
        finally:
            ended.set()

    listener = await transport.listen(address, serve)
    control.send(listener.address)
    async with asyncio.timeout(10 * START_TIMEOUT_S):
        await ended.wait()
    await listener.close()


class BlockRow(NamedTuple):
    transport: str
    num_tokens: int
    milliseconds: float  # from Offer to Landed, median
    gb_per_s: float
    bare_gb_per_s: float  # the same transport, bare messages of the same sizes

    @property
    def ratio(self) -> float:
        return self.gb_per_s / self.bare_gb_per_s


def measure(
    name: str, address: str, core: int, prompt_tokens: tuple[int, ...], rounds: int
) -> list[BlockRow]:
    """Protocol and bare messages in turn, so that a busy moment of the machine meets both."""
    handovers, bare = Handovers(address, core), Transport(_another(address), core)
    piece_bytes = max(1, TransferConfig().piece_bytes // BLOCK_BYTES) * BLOCK_BYTES
    rows = []
    try:
        for num_tokens in prompt_tokens:
            num_blocks = num_tokens // BLOCK_SIZE
            num_bytes = num_blocks * BLOCK_BYTES
            ours, theirs = [], []
            for _ in range(rounds + 1):  # the first one warms up
                ours.append(handovers.transfer(num_blocks).seconds)
                theirs.append(bare.stream(piece_bytes, -(-num_bytes // piece_bytes)).seconds)
            seconds, bare_seconds = _median(ours[1:]), _median(theirs[1:])
            rows.append(
                BlockRow(
                    name, num_tokens, 1e3 * seconds, num_bytes / seconds / 1e9, num_bytes / bare_seconds / 1e9
                )
            )
    finally:
        handovers.close()
        bare.close()
    return rows


def _another(address: str) -> str:
    """An address beside ``address`` for the second listener: ports are chosen anew, paths are not."""
    return f"{address}-bare" if address.startswith("zmq+ipc://") else address


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
