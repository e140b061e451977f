"""Sender and receiver against each other over a real transport, with plain byte arrays for caches."""

import asyncio
import collections.abc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec
import pytest

from common import messages
from common.config import TransferConfig
from common.messages import (
    Accept,
    Blocks,
    DecodeTarget,
    Failed,
    Generate,
    Handover,
    Hello,
    Layout,
    Offer,
    Refusal,
    Refused,
    Sampling,
    Welcome,
)
from common.roster import Reservation
from common.sequence import Sequence, SequenceKey
from kv_transfer import transport
from kv_transfer.checksum import LibraryHash
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Outcome, Sender

BLOCK_BYTES = 512
BLOCK_SIZE = 4
NUM_LAYERS = 4
LAYER_BYTES = BLOCK_BYTES // NUM_LAYERS
LAYOUT = Layout(1, "model", "float32", NUM_LAYERS, 1, 4, BLOCK_SIZE)
CONFIG = TransferConfig(piece_bytes=2 * BLOCK_BYTES, credit_bytes=4 * BLOCK_BYTES, stall_timeout_s=5.0)
TIMEOUT_S = 30.0
names = count()


@dataclass
class Memory:
    """A cache and its free list, on either side."""

    num_blocks: int
    data: bytearray = field(init=False)
    free: list[int] = field(init=False)
    cached: dict[bytes, int] = field(default_factory=dict)
    lent: int = 0
    dead: set[SequenceKey] = field(default_factory=set)
    on_device: None = None

    def __post_init__(self) -> None:
        self.data = bytearray(self.num_blocks * BLOCK_BYTES)
        self.free = list(range(self.num_blocks))

    def block(self, block_id: int) -> memoryview:
        return memoryview(self.data)[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES]

    def part(self, block_id: int, layers: range | None) -> memoryview:
        layers = layers or range(NUM_LAYERS)
        return self.block(block_id)[layers.start * LAYER_BYTES : layers.stop * LAYER_BYTES]

    def lend(
        self, sequence: Sequence, first: int, count: int, layers: range | None = None
    ) -> list[memoryview] | None:
        if sequence.key in self.dead:
            return None
        self.lent += 1
        return [self.part(b, layers) for b in sequence.block_ids[first : first + count]]

    def take_back(self, sequence: Sequence) -> None:
        self.lent -= 1

    def reserve(self, num_tokens: int, block_hashes: tuple[bytes, ...]) -> Reservation | None:
        needed = -(-num_tokens // BLOCK_SIZE)
        if needed > self.num_blocks:
            raise Refusal("invalid", f"prompt needs {needed} blocks, the pool has {self.num_blocks}")
        known = []
        for block_hash in block_hashes:
            if block_hash not in self.cached:
                break
            known.append(self.cached[block_hash])
        if needed - len(known) > len(self.free):
            return None
        fresh = [self.free.pop() for _ in range(needed - len(known))]
        return Reservation(num_tokens, block_hashes, known + fresh, len(known))

    def landing_views(
        self, held: Reservation, first: int, count: int, layers: range | None = None
    ) -> list[memoryview]:
        return [self.part(b, layers) for b in held.block_ids[first : first + count]]

    def landed(
        self,
        held: Reservation,
        first: int,
        count: int,
        views: list[memoryview],
        layers: range | None = None,
    ) -> None:
        pass

    def cancel(self, held: Reservation) -> None:
        self.free.extend(held.block_ids[held.num_cached_blocks :])

    def prompt(self, request_id: str, num_tokens: int, handoff_to: DecodeTarget) -> tuple[Generate, Sequence]:
        """A computed prompt with random bytes for its blocks."""
        tokens = tuple(range(num_tokens))
        generate = Generate(request_id, 0, tokens, num_tokens, "proxy", Sampling(max_tokens=8), handoff_to)
        sequence = Sequence.from_generate(generate, handoff=True)
        sequence.block_ids = [self.free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        sequence.block_hashes = [f"{request_id}:{i}".encode() for i in range(num_tokens // BLOCK_SIZE)]
        for block_id in sequence.block_ids:
            self.block(block_id)[:] = os.urandom(BLOCK_BYTES)
        return generate, sequence


class Pair:
    """A sender and a receiver with a connection between them."""

    def __init__(self, decode_blocks: int = 64, config: TransferConfig = CONFIG) -> None:
        self.p, self.d = Memory(256), Memory(decode_blocks)
        self.adopted: dict[str, tuple[Reservation, Handover]] = {}
        self.outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self.receiver = Receiver(self.d, config, "d1", LAYOUT, BLOCK_BYTES, self.adopt)
        self.sender = Sender(self.p, config, "p1", LAYOUT, BLOCK_BYTES, self.outcomes.put_nowait)
        self.address = f"inproc://pair-{next(names)}"
        self.target = DecodeTarget(self.address, "d1")

    def adopt(self, held: Reservation, handover: Handover) -> None:
        self.adopted[handover.generate.request_id] = (held, handover)

    def send_all(self, generate: Generate, sequence: Sequence) -> None:
        self.sender.offer(generate, sequence)
        self.sender.progress(sequence.key, len(generate.token_ids))
        self.sender.hand_over(sequence.key, (7,), (), {})

    async def outcome(self) -> Outcome:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.outcomes.get()

    def received(self, request_id: str) -> bytes:
        return b"".join(self.d.block(b) for b in self.adopted[request_id][0].block_ids)

    def sent(self, sequence: Sequence) -> bytes:
        return b"".join(self.p.block(b) for b in sequence.block_ids)


@asynccontextmanager
async def running(pair: Pair, serve: transport.ConnectionHandler | None = None) -> AsyncIterator[Pair]:
    listener = await transport.listen(pair.address, serve or pair.receiver.serve)
    try:
        yield pair
    finally:
        await pair.sender.close()
        await listener.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_blocks_arrive_unchanged_and_the_sequence_is_handed_over() -> None:
    async with running(Pair()) as pair:
        generate, sequence = pair.p.prompt("a", 30, pair.target)
        pair.send_all(generate, sequence)
        outcome = await pair.outcome()
        assert outcome.key == sequence.key and outcome.error is None
        assert pair.received("a") == pair.sent(sequence)
        assert pair.adopted["a"][1].generate == generate
        assert pair.adopted["a"][1].token_ids == (7,)
        assert pair.p.lent == 0 and pair.sender.num_open == 0 and pair.receiver.num_open == 0


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 31, 32, 33, 100])
async def test_every_prompt_length_around_block_borders_lands_whole(num_tokens: int) -> None:
    async with running(Pair()) as pair:
        generate, sequence = pair.p.prompt("a", num_tokens, pair.target)
        pair.send_all(generate, sequence)
        assert (await pair.outcome()).error is None
        assert pair.received("a") == pair.sent(sequence)


async def test_finished_blocks_travel_before_the_prompt_is_computed() -> None:
    async with running(Pair()) as pair:
        generate, sequence = pair.p.prompt("a", 30, pair.target)
        pair.sender.offer(generate, sequence)
        pair.sender.progress(sequence.key, 9)
        await until(lambda: pair.sender.counters.sent_blocks == 2)
        pair.sender.progress(sequence.key, 30)
        await until(lambda: pair.sender.counters.sent_blocks == 8)
        assert "a" not in pair.adopted
        pair.sender.hand_over(sequence.key, (7,), (), {})
        assert (await pair.outcome()).error is None


async def test_layers_travel_while_the_others_are_computed() -> None:
    async with running(Pair()) as pair:
        generate, sequence = pair.p.prompt("a", 30, pair.target)
        pair.sender.offer(generate, sequence)
        for num_layers in range(1, NUM_LAYERS + 1):
            pair.sender.progress(sequence.key, 18, num_layers)
            expected = 4 * num_layers * LAYER_BYTES
            await until(lambda expected=expected: pair.sender.counters.sent_bytes == expected)  # type: ignore[misc]
        pair.sender.progress(sequence.key, 18)
        pair.sender.progress(sequence.key, 30, 3)
        await until(lambda: pair.receiver.counters.received_bytes == 4 * BLOCK_BYTES + 4 * 3 * LAYER_BYTES)
        assert "a" not in pair.adopted
        pair.sender.hand_over(sequence.key, (7,), (), {})
        assert (await pair.outcome()).error is None
        assert pair.received("a") == pair.sent(sequence)
        assert pair.sender.counters.sent_blocks == 8
        assert pair.sender.counters.sent_bytes == pair.receiver.counters.received_bytes == 8 * BLOCK_BYTES


async def test_a_step_under_way_when_the_offer_is_accepted_gives_what_it_has_passed() -> None:
    async with running(Pair(decode_blocks=10)) as pair:
        first, (generate, sequence) = pair.p.prompt("a", 30, pair.target), pair.p.prompt("b", 30, pair.target)
        pair.send_all(*first)
        assert (await pair.outcome()).error is None
        pair.sender.offer(generate, sequence)
        pair.sender.progress(sequence.key, 30, 2)
        await until(lambda: pair.receiver.num_open == 1)
        sent_before = pair.sender.counters.sent_bytes
        pair.d.cancel(pair.adopted["a"][0])
        pair.receiver.admit_waiting()
        await until(lambda: pair.sender.counters.sent_bytes == sent_before + 8 * 2 * LAYER_BYTES)
        pair.sender.hand_over(sequence.key, (7,), (), {})
        assert (await pair.outcome()).error is None
        assert pair.received("b") == pair.sent(sequence)


@pytest.mark.parametrize("ends", ["cancelled here", "aborted there", "connection lost"])
async def test_a_transfer_that_ends_in_the_middle_of_a_step_leaves_nothing_behind(ends: str) -> None:
    pair = Pair()
    listener = await transport.listen(pair.address, pair.receiver.serve)
    generate, sequence = pair.p.prompt("a", 30, pair.target)
    pair.sender.offer(generate, sequence)
    pair.sender.progress(sequence.key, 30, 2)
    await until(lambda: pair.receiver.counters.received_bytes == 8 * 2 * LAYER_BYTES)
    if ends == "cancelled here":
        pair.sender.cancel(sequence.key, "client left")
    elif ends == "aborted there":
        assert pair.receiver.abort(sequence.key, "client left")
    else:
        await listener.close()
    await until(lambda: pair.receiver.num_open == 0 and pair.sender.num_open == 0)
    pair.sender.progress(sequence.key, 30, 4)
    pair.sender.hand_over(sequence.key, (7,), (), {})
    assert len(pair.d.free) == pair.d.num_blocks and pair.p.lent == 0 and not pair.adopted
    await pair.sender.close()
    await listener.close()


async def test_what_is_followed_at_once_goes_unanswered_up_to_a_quarter_of_the_credit() -> None:
    config = replace(CONFIG, credit_bytes=64 * BLOCK_BYTES)
    answered: list[int] = []

    async def serve(connection: transport.Connection) -> None:
        await connection.receive()
        await connection.send(messages.encode(Welcome("d1")))
        offer = messages.decode_transfer((await connection.receive())[0])
        assert isinstance(offer, Offer)
        await connection.send(messages.encode(Accept(offer.transfer_id, 0, config.credit_bytes)))
        while isinstance(message := messages.decode_transfer((await connection.receive())[0]), Blocks):
            if message.wants_answer:
                answered.append(message.first + message.count)
                landed = messages.Credit(offer.transfer_id, answered[-1] * BLOCK_BYTES)
                await connection.send(messages.encode(landed))
        await connection.send(messages.encode(messages.Landed(offer.transfer_id)))

    async with running(Pair(config=config), serve) as pair:
        generate, sequence = pair.p.prompt("a", 40 * BLOCK_SIZE, pair.target)
        pair.sender.offer(generate, sequence)
        pair.sender.progress(sequence.key, 20 * BLOCK_SIZE)
        await until(lambda: answered == [16, 20])
        pair.sender.progress(sequence.key, 40 * BLOCK_SIZE)
        pair.sender.hand_over(sequence.key, (7,), (), {})
        assert (await pair.outcome()).error is None
        assert answered == [16, 20, 36]
        assert pair.sender.counters.bytes_per_s["d1"] > 0


async def test_blocks_the_receiver_holds_are_not_sent() -> None:
    async with running(Pair()) as pair:
        generate, sequence = pair.p.prompt("a", 30, pair.target)
        for index in range(3):
            block_id = pair.d.free.pop()
            pair.d.block(block_id)[:] = pair.p.block(sequence.block_ids[index])
            pair.d.cached[sequence.block_hashes[index]] = block_id
        pair.send_all(generate, sequence)
        assert (await pair.outcome()).error is None
        assert pair.sender.counters.sent_blocks == 5 and pair.sender.counters.skipped_blocks == 3
        assert pair.received("a") == pair.sent(sequence)


async def test_many_transfers_share_a_connection_and_none_mixes_with_another() -> None:
    async with running(Pair(decode_blocks=2000)) as pair:
        prompts = [pair.p.prompt(f"r{i}", 3 + 5 * i, pair.target) for i in range(12)]
        for generate, sequence in prompts:
            pair.send_all(generate, sequence)
        for _ in prompts:
            assert (await pair.outcome()).error is None
        for generate, sequence in prompts:
            assert pair.received(generate.request_id) == pair.sent(sequence)


async def test_an_offer_waits_for_room_and_lands_when_there_is_some() -> None:
    async with running(Pair(decode_blocks=10)) as pair:
        first, second = pair.p.prompt("a", 30, pair.target), pair.p.prompt("b", 30, pair.target)
        pair.send_all(*first)
        assert (await pair.outcome()).key == first[1].key
        pair.send_all(*second)
        await until(lambda: pair.receiver.num_open == 1)
        assert pair.outcomes.empty()
        pair.d.cancel(pair.adopted["a"][0])
        pair.receiver.admit_waiting()
        assert (await pair.outcome()).error is None
        assert pair.received("b") == pair.sent(second[1])


async def test_the_most_important_offer_is_given_room_first() -> None:
    async with running(Pair(decode_blocks=10)) as pair:
        pair.send_all(*pair.p.prompt("first", 30, pair.target))
        assert (await pair.outcome()).error is None
        for number, (name, priority) in enumerate((("later", 5), ("soon", 0), ("then", 0), ("now", -1)), 1):
            generate, sequence = pair.p.prompt(name, 30, pair.target)
            sequence.priority = priority
            pair.send_all(generate, sequence)
            await until(lambda: pair.receiver.num_open == number)  # noqa: B023
        last, landed = "first", []
        for _ in range(4):
            pair.d.cancel(pair.adopted[last][0])
            pair.receiver.admit_waiting()
            last = (await pair.outcome()).key.request_id
            landed.append(last)
        assert landed == ["now", "soon", "then", "later"]


async def test_a_prompt_that_can_never_fit_is_refused_by_name() -> None:
    async with running(Pair(decode_blocks=4)) as pair:
        pair.send_all(*pair.p.prompt("a", 30, pair.target))
        error = (await pair.outcome()).error
        assert error is not None and error.code == "invalid" and "8 blocks" in error.message


async def test_an_offer_without_room_is_refused_at_its_deadline() -> None:
    async with running(Pair(decode_blocks=8)) as pair:
        pair.d.free.clear()
        generate, sequence = pair.p.prompt("a", 8, pair.target)
        sequence.deadline -= generate.deadline_s - 0.2
        pair.send_all(generate, sequence)
        error = (await pair.outcome()).error
        assert error is not None and error.code == "deadline"
        assert pair.receiver.num_open == 0


async def test_cancel_frees_the_receivers_blocks() -> None:
    async with running(Pair()) as pair:
        generate, sequence = pair.p.prompt("a", 30, pair.target)
        pair.sender.offer(generate, sequence)
        pair.sender.progress(sequence.key, 16)
        await until(lambda: pair.sender.counters.sent_blocks == 4)
        pair.sender.cancel(sequence.key, "client left")
        await until(lambda: pair.receiver.num_open == 0)
        assert len(pair.d.free) == pair.d.num_blocks and pair.p.lent == 0
        assert pair.outcomes.empty()


async def test_an_abort_at_the_receiver_fails_the_transfer_at_the_sender() -> None:
    async with running(Pair()) as pair:
        generate, sequence = pair.p.prompt("a", 30, pair.target)
        pair.sender.offer(generate, sequence)
        await until(lambda: pair.receiver.num_open == 1)
        assert pair.receiver.abort(sequence.key, "aborted")
        error = (await pair.outcome()).error
        assert error is not None and len(pair.d.free) == pair.d.num_blocks


async def test_a_draining_receiver_refuses_new_offers() -> None:
    async with running(Pair()) as pair:
        pair.receiver.draining = True
        pair.send_all(*pair.p.prompt("a", 8, pair.target))
        error = (await pair.outcome()).error
        assert error is not None and error.code == "draining"


async def test_an_unreachable_decode_worker_fails_only_its_own_transfers() -> None:
    async with running(Pair()) as pair:
        lost = pair.p.prompt("lost", 8, DecodeTarget("inproc://nobody", "d9"))
        good = pair.p.prompt("good", 8, pair.target)
        pair.send_all(*lost)
        pair.send_all(*good)
        outcomes = {(await pair.outcome()) for _ in range(2)}
        errors = {outcome.key.request_id: outcome.error for outcome in outcomes}
        assert errors["good"] is None
        assert errors["lost"] is not None and errors["lost"].code == "peer_lost"


async def test_another_incarnation_at_the_address_is_not_talked_to() -> None:
    async with running(Pair()) as pair:
        pair.send_all(*pair.p.prompt("a", 8, replace_incarnation(pair.target)))
        error = (await pair.outcome()).error
        assert error is not None and error.code == "peer_lost" and "incarnation" in error.message


def replace_incarnation(target: DecodeTarget) -> DecodeTarget:
    return DecodeTarget(target.address, "someone else")


@pytest.mark.parametrize("name", ["model_fingerprint", "dtype", "num_layers", "head_dim", "block_size"])
async def test_caches_of_another_shape_are_refused_with_the_field_named(name: str) -> None:
    pair = Pair()
    other = "other" if isinstance(getattr(LAYOUT, name), str) else 99
    pair.sender = Sender(
        pair.p,
        CONFIG,
        "p1",
        msgspec.structs.replace(LAYOUT, **{name: other}),
        BLOCK_BYTES,
        pair.outcomes.put_nowait,
    )
    async with running(pair):
        pair.send_all(*pair.p.prompt("a", 8, pair.target))
        error = (await pair.outcome()).error
        assert error is not None and name in error.message


async def test_a_lost_connection_frees_the_receiver_and_fails_the_sender() -> None:
    pair = Pair()
    listener = await transport.listen(pair.address, pair.receiver.serve)
    generate, sequence = pair.p.prompt("a", 30, pair.target)
    pair.sender.offer(generate, sequence)
    pair.sender.progress(sequence.key, 16)
    await until(lambda: pair.sender.counters.sent_blocks == 4)
    await listener.close()
    error = (await pair.outcome()).error
    assert error is not None and error.code == "peer_lost"
    await until(lambda: pair.receiver.num_open == 0)
    assert len(pair.d.free) == pair.d.num_blocks and pair.p.lent == 0


class Rogue:
    """A prefill worker that speaks the protocol by hand, and wrongly."""

    def __init__(self, connection: transport.Connection) -> None:
        self.connection = connection

    async def say(self, message: messages.Transfer, payload: bytes = b"") -> None:
        await self.connection.send(messages.encode(message), [payload] if payload else [], bool(payload))

    async def hear(self) -> messages.Transfer:
        async with asyncio.timeout(TIMEOUT_S):
            return messages.decode_transfer((await self.connection.receive())[0])

    async def open(self, num_tokens: int = 16) -> None:
        await self.say(Hello("rogue", "d1", LAYOUT))
        assert isinstance(await self.hear(), Welcome)
        await self.say(Offer("t", "a", 0, num_tokens, (), 60.0))
        assert isinstance(await self.hear(), Accept)


@asynccontextmanager
async def rogue(pair: Pair) -> AsyncIterator[Rogue]:
    async with running(pair):
        connection = await transport.connect(pair.address, timeout_s=TIMEOUT_S)
        try:
            yield Rogue(connection)
        finally:
            await connection.close()


def blocks(first: int, count: int) -> Blocks:
    return Blocks("t", first, count)


def layers_of_block(start: int, stop: int) -> Blocks:
    return Blocks("t", 0, 1, layers=(start, stop))


@pytest.mark.parametrize(
    ("message", "payload", "cause"),
    [
        (blocks(0, 1), b"x" * 100, "wrong extent"),
        (blocks(3, 2), b"x" * 2 * BLOCK_BYTES, "wrong extent"),
        (blocks(-1, 1), b"x" * BLOCK_BYTES, "wrong extent"),
        (blocks(0, 0), b"", "wrong extent"),
        (layers_of_block(0, 2), b"x" * BLOCK_BYTES, "wrong extent"),
        (layers_of_block(2, 2), b"", "wrong extent"),
        (layers_of_block(3, 5), b"x" * 2 * LAYER_BYTES, "wrong extent"),
        (layers_of_block(-1, 1), b"x" * 2 * LAYER_BYTES, "wrong extent"),
        (layers_of_block(2, 4), b"x" * 2 * LAYER_BYTES, "layers are missing"),
        (
            Handover("t", Generate("a", 0, (1,) * 16, 16, "x", Sampling(1)), (7,)),
            b"",
            "handover before all blocks",
        ),
        (
            Handover("t", Generate("b", 0, (1,) * 16, 16, "x", Sampling(1)), (7,)),
            b"",
            "handover differs from its offer",
        ),
    ],
)
async def test_wrong_data_ends_the_transfer_and_frees_its_blocks(
    message: messages.Transfer, payload: bytes, cause: str
) -> None:
    pair = Pair()
    async with rogue(pair) as peer:
        await peer.open()
        await peer.say(message, payload)
        assert isinstance(await peer.hear(), Failed)
        assert pair.receiver.counters.num_fenced[cause] == 1
        assert len(pair.d.free) == pair.d.num_blocks and not pair.adopted


class AlwaysOther(LibraryHash):
    """A hash that never agrees."""

    def digest(self) -> bytes:
        return os.urandom(8)


@pytest.mark.parametrize("message", [blocks(0, 1), layers_of_block(0, 2)])
async def test_blocks_that_were_altered_on_their_way_end_the_transfer_and_free_its_blocks(
    message: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.mailbox.digest_for", lambda num_bytes: AlwaysOther())
    pair = Pair()
    async with rogue(pair) as peer:
        await peer.open()
        await peer.say(message, bytes(BLOCK_BYTES if message.layers is None else 2 * LAYER_BYTES))
        assert isinstance(await peer.hear(), Failed)
        assert pair.receiver.counters.num_fenced["checksum"] == 1
        assert len(pair.d.free) == pair.d.num_blocks and not pair.adopted


async def test_a_repeated_run_of_blocks_ends_the_transfer() -> None:
    pair = Pair()
    async with rogue(pair) as peer:
        await peer.open()
        payload = b"x" * BLOCK_BYTES
        await peer.say(blocks(0, 1), payload)
        await peer.hear()
        await peer.say(blocks(0, 1), payload)
        assert isinstance(await peer.hear(), Failed)
        assert pair.receiver.counters.num_fenced["repeated"] == 1


async def test_layers_that_come_twice_end_the_transfer() -> None:
    pair = Pair()
    async with rogue(pair) as peer:
        await peer.open()
        payload = b"x" * 2 * LAYER_BYTES
        await peer.say(layers_of_block(0, 2), payload)
        assert await peer.hear() == messages.Credit("t", 2 * LAYER_BYTES)
        await peer.say(layers_of_block(1, 3), payload)
        assert isinstance(await peer.hear(), Failed)
        assert pair.receiver.counters.num_fenced["repeated"] == 1


async def test_blocks_without_their_last_layers_are_not_handed_over() -> None:
    pair = Pair()
    async with rogue(pair) as peer:
        await peer.open(num_tokens=4)
        payload = b"x" * 3 * LAYER_BYTES
        await peer.say(layers_of_block(0, 3), payload)
        await peer.hear()
        await peer.say(Handover("t", Generate("a", 0, (1,) * 4, 4, "x", Sampling(1)), (7,)))
        assert isinstance(await peer.hear(), Failed)
        assert pair.receiver.counters.num_fenced["handover before all blocks"] == 1 and not pair.adopted


async def test_data_for_no_open_transfer_is_counted_and_writes_nothing() -> None:
    pair = Pair()
    before = bytes(pair.d.data)
    async with rogue(pair) as peer:
        await peer.say(Hello("rogue", "d1", LAYOUT))
        await peer.hear()
        payload = b"x" * BLOCK_BYTES
        await peer.say(blocks(0, 1), payload)
        await until(lambda: pair.receiver.counters.num_fenced["no open transfer"] == 1)
        assert bytes(pair.d.data) == before
        await peer.say(Offer("t", "a", 0, 16, (), 60.0))
        assert isinstance(await peer.hear(), Accept)


async def test_a_transfer_belongs_to_the_connection_that_opened_it() -> None:
    pair = Pair()
    async with rogue(pair) as peer:
        await peer.open()
        connection = await transport.connect(pair.address, timeout_s=TIMEOUT_S)
        intruder = Rogue(connection)
        await intruder.say(Hello("intruder", "d1", LAYOUT))
        await intruder.hear()
        payload = b"x" * BLOCK_BYTES
        await intruder.say(blocks(0, 1), payload)
        await until(lambda: pair.receiver.counters.num_fenced["no open transfer"] == 1)
        await connection.close()
        await peer.say(blocks(0, 1), payload)
        assert isinstance(await peer.hear(), messages.Credit)


async def test_all_offers_of_a_lost_peer_end_also_those_that_are_refused_meanwhile() -> None:
    pair = Pair(decode_blocks=10)
    async with rogue(pair) as peer:
        await peer.open()
        for name, num_tokens in (("whole pool", 40), ("more than there is", 100), ("small", 8)):
            await peer.say(Offer(name, name, 0, num_tokens, (), 60.0))
        await until(lambda: pair.receiver.num_open == 4)
        await peer.connection.close()
        await until(lambda: pair.receiver.num_open == 0)
        assert len(pair.d.free) == pair.d.num_blocks


class Halting:
    """A connection whose payloads end only when told to."""

    def __init__(self, connection: transport.Connection) -> None:
        self._connection = connection
        self.peer = connection.peer
        self.on_device = connection.on_device
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def send(
        self,
        header: bytes,
        payload: collections.abc.Sequence[transport.Buffer] = (),
        is_guarded: bool = False,
        released: collections.abc.Callable[[], None] = transport.nobody,
    ) -> None:
        await self._connection.send(header, payload, is_guarded, released)

    def send_now(self, header: bytes) -> bool:
        return self._connection.send_now(header)

    async def receive(self) -> tuple[bytes, int]:
        return await self._connection.receive()

    async def receive_payload(self, into: collections.abc.Sequence[memoryview]) -> bool:
        self.reached.set()
        await self.go_on.wait()
        return await self._connection.receive_payload(into)

    async def close(self) -> None:
        await self._connection.close()


async def test_a_payload_that_never_ends_is_given_up() -> None:
    pair = Pair(config=replace(CONFIG, stall_timeout_s=0.3))

    async def serve(connection: transport.Connection) -> None:
        await pair.receiver.serve(Halting(connection))

    async with running(pair, serve):
        pair.send_all(*pair.p.prompt("a", 16, pair.target))
        outcome = await pair.outcome()
        assert outcome.error is not None and outcome.error.code == "peer_lost"
        await until(lambda: len(pair.d.free) == pair.d.num_blocks)


async def test_blocks_of_a_transfer_given_up_in_mid_payload_go_to_the_next_in_the_queue() -> None:
    pair = Pair(decode_blocks=4)
    connected: asyncio.Future[Halting] = asyncio.get_running_loop().create_future()

    async def serve(connection: transport.Connection) -> None:
        connected.set_result(Halting(connection))
        await pair.receiver.serve(connected.result())

    async with running(pair, serve):
        first, second = pair.p.prompt("a", 16, pair.target), pair.p.prompt("b", 16, pair.target)
        pair.send_all(*first)
        pair.send_all(*second)
        connection = await connected
        await connection.reached.wait()
        assert pair.receiver.num_open == 2
        assert pair.receiver.abort(first[1].key, "client left")
        assert not pair.d.free, "still being written to"
        connection.go_on.set()
        assert {(await pair.outcome()).key for _ in range(2)} == {first[1].key, second[1].key}
        assert pair.received("b") == pair.sent(second[1])


async def test_bytes_that_are_no_message_cut_the_peer_off_and_nobody_else() -> None:
    pair = Pair()
    async with rogue(pair) as peer:
        await peer.open()
        await peer.connection.send(b"\xc1 not a message")
        with pytest.raises(ConnectionError):
            await peer.hear()
        await until(lambda: pair.receiver.num_open == 0)
        pair.send_all(*pair.p.prompt("good", 8, pair.target))
        assert (await pair.outcome()).error is None


async def test_without_a_fitting_hello_nothing_else_is_heard() -> None:
    pair = Pair()
    async with rogue(pair) as peer:
        await peer.say(Hello("rogue", "d1", msgspec.structs.replace(LAYOUT, dtype="int3")))
        refused = await peer.hear()
        assert isinstance(refused, Refused) and "dtype" in refused.reason
        assert pair.receiver.num_open == 0


async def test_a_receiver_that_stops_answering_fails_the_transfer() -> None:
    config = replace(CONFIG, stall_timeout_s=0.3)
    pair = Pair(config=config)

    async def deaf(connection: transport.Connection) -> None:
        """Accepts, then neither lands nor answers."""
        await connection.receive()
        await connection.send(messages.encode(Welcome("d1")))
        header, _ = await connection.receive()
        offer = messages.decode_transfer(header)
        assert isinstance(offer, Offer)
        await connection.send(messages.encode(Accept(offer.transfer_id, 0, 100 * BLOCK_BYTES)))
        while True:
            await connection.receive()

    listener = await transport.listen(pair.address, deaf)
    generate, sequence = pair.p.prompt("a", 30, pair.target)
    pair.send_all(generate, sequence)
    error = (await pair.outcome()).error
    assert error is not None and error.code == "peer_lost" and "no progress" in error.message
    assert pair.p.lent == 0
    await pair.sender.close()
    await listener.close()
