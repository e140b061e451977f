"""Prompts handed over between caches that stand in for a device's: by way of buffers, or straight from where
blocks are to where they shall be."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from torch import Tensor

from common.config import TransferConfig
from common.device_blocks import DeviceBlocks
from common.engine import Engine, Reservation
from common.messages import DecodeTarget, Generate, Handover, Sampling
from common.sequence import Sequence as Request
from common.sequence import State
from common.staging import Staging
from kv_transfer import transport
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Outcome, Sender
from tests.common.toy import generate, make_engine, make_sequence, prompt, run

TIMEOUT_S = 60.0
names = count()
HOST, DEVICE = False, True
needs_ucx = pytest.mark.skipif("ucx" not in transport.available(), reason="ucxx is not installed")


class Pair:
    def __init__(self, source_staged: bool, target_staged: bool, **config: Any) -> None:
        self.source, self.target = make_engine(staged=source_staged), make_engine(staged=target_staged)
        block_bytes = self.source.cache.block_bytes
        self.config = TransferConfig(piece_bytes=max(1024, 2 * block_bytes), **config)
        self.adopted: dict[str, Reservation] = {}
        self.outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        layout = self.source.layout
        self.receiver = Receiver(self.target, self.config, "d", layout, block_bytes, self.adopt)
        self.sender = Sender(self.source, self.config, "p", layout, block_bytes, self.outcomes.put_nowait)

    def adopt(self, reservation: Reservation, handover: Handover) -> None:
        self.adopted[handover.generate.request_id] = reservation

    async def hand_over(self, address: str, tokens: list[int]) -> Outcome:
        """Prefill, then move all blocks."""
        sequence = make_sequence(f"r{len(self.adopted)}", tokens, handoff=True)
        self.source.add(sequence)
        run(self.source)
        assert sequence.state is State.PARKED
        target = DecodeTarget(address, "d")
        request_id, attempt = sequence.key
        message = Generate(
            request_id, attempt, tuple(tokens), len(tokens), "x", Sampling(max_tokens=8), target
        )
        self.sender.offer(message, sequence)
        self.sender.hand_over(sequence.key, (sequence.token_ids[-1],), (), {})
        async with asyncio.timeout(TIMEOUT_S):
            outcome = await self.outcomes.get()
        assert outcome.sequence is sequence
        self.source.release(sequence.key)
        return outcome

    def rest_of(self, sequence: Request) -> list[int]:
        """The tokens that the target gives."""
        request_id = sequence.key.request_id
        successor = make_sequence(
            request_id, sequence.token_ids, num_prompt_tokens=sequence.num_prompt_tokens
        )
        self.target.adopt(self.adopted[request_id], successor)
        run(self.target)
        return successor.token_ids[successor.num_prompt_tokens :]


@asynccontextmanager
async def listening(pair: Pair, scheme: str) -> AsyncIterator[str]:
    place = f"baton-device-{next(names)}" if scheme == "inproc" else "127.0.0.1:0"
    listener = await transport.listen(f"{scheme}://{place}", pair.receiver.serve)
    try:
        yield listener.address
    finally:
        await pair.sender.close()
        await listener.close()


@pytest.mark.parametrize("scheme", ["inproc", pytest.param("ucx", marks=needs_ucx)])
@pytest.mark.parametrize("sides", [(HOST, DEVICE), (DEVICE, HOST), (DEVICE, DEVICE)])
@pytest.mark.parametrize("checksums", [True, False])
async def test_a_sequence_goes_on_wherever_its_blocks_were_and_are(
    scheme: str, sides: tuple[bool, bool], checksums: bool
) -> None:
    pair = Pair(*sides, checksums=checksums)
    async with listening(pair, scheme) as address:
        for length in (3, 37):
            tokens = prompt(length)
            outcome = await pair.hand_over(address, tokens)
            assert outcome.error is None
            assert pair.rest_of(outcome.sequence) == generate(tokens)
    assert pair.source.load().num_free_blocks == pair.target.load().num_free_blocks == 64


@needs_ucx
async def test_from_device_to_device_nothing_passes_through_main_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(DEVICE, DEVICE)

    def refuse(*_: object) -> memoryview:
        raise AssertionError("blocks were staged")

    monkeypatch.setattr(Staging, "read", refuse)
    monkeypatch.setattr(Staging, "landing", refuse)
    async with listening(pair, "ucx") as address:
        assert (await pair.hand_over(address, prompt(30))).error is None


@needs_ucx
@pytest.mark.parametrize("target", [HOST, DEVICE])
async def test_blocks_that_change_on_their_way_are_fenced(
    target: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_transfer.ucx import UcxConnection

    send_tensors = UcxConnection.send_tensors

    async def send_altered(
        self: UcxConnection, header: bytes, payload: Sequence[Tensor], released: Callable[[], None]
    ) -> None:
        altered = [tensor.clone() for tensor in payload]
        altered[-1][7] ^= 1
        await send_tensors(self, header, altered, released)

    monkeypatch.setattr(UcxConnection, "send_tensors", send_altered)
    pair = Pair(DEVICE, target)
    async with listening(pair, "ucx") as address:
        outcome = await pair.hand_over(address, prompt(30))
        assert outcome.error is not None and outcome.error.message == "transfer refused: checksum"
    assert pair.receiver.counters.num_fenced["checksum"] == 1
    assert pair.target.load().num_free_blocks == 64


@needs_ucx
async def test_blocks_whose_checksum_fails_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DeviceBlocks) -> bytes:
        raise OSError("the device is gone")

    monkeypatch.setattr(DeviceBlocks, "checksum", fail)
    pair = Pair(DEVICE, HOST)
    async with listening(pair, "ucx") as address:
        outcome = await pair.hand_over(address, prompt(30))
        assert outcome.error is not None and "the device is gone" in outcome.error.message
    assert pair.source.load().num_free_blocks == pair.target.load().num_free_blocks == 64


@needs_ucx
async def test_pieces_that_are_no_blocks_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_transfer.ucx import UcxConnection

    send_tensors = UcxConnection.send_tensors

    async def send_halves(
        self: UcxConnection, header: bytes, payload: Sequence[Tensor], released: Callable[[], None]
    ) -> None:
        halves = [half for tensor in payload for half in tensor.view(2, -1)]
        await send_tensors(self, header, halves, released)

    monkeypatch.setattr(UcxConnection, "send_tensors", send_halves)
    pair = Pair(DEVICE, DEVICE)
    async with listening(pair, "ucx") as address:
        outcome = await pair.hand_over(address, prompt(30))
        assert outcome.error is not None and outcome.error.code == "peer_lost"
        assert "pieces that are no blocks" in outcome.error.message
    assert pair.target.load().num_free_blocks == 64


def test_engines_say_where_their_blocks_are() -> None:
    engine: Engine = make_engine(staged=True)
    assert engine.on_device is engine
    assert make_engine().on_device is None
