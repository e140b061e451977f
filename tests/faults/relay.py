"""A TCP relay that misbehaves when told to.

    client  -- forward ->   relay  -- forward ->   target
    client  <- backward --  relay  <- backward --  target

Each direction has its ``Faults``, which can be changed while connections are open. A relay runs in a thread
of its own; its methods may be called from any other. As a process, ``python -m tests.faults.relay --listen
127.0.0.1:0 --target 127.0.0.1:7001`` reads one JSON ``Command`` a line from stdin and answers each with its
counts.
"""

import argparse
import asyncio
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from common.loop_thread import LoopThread

CHUNK_BYTES = 64 << 10
MAX_QUEUED_CHUNKS = 256  # per direction of a connection: what a delay can hold back
CALL_TIMEOUT_S = 10.0

How = Literal["close", "reset"]
T = TypeVar("T")


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        host, _, port = text.rpartition(":")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


ANY_PORT = Address("127.0.0.1", 0)


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to the bytes of one direction. Offsets count the bytes of one connection in this
    direction, from when these faults were set."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # up to this much more delay, by chance; the order is kept
    bytes_per_s: float | None = None
    cut_after_bytes: int | None = None
    cut: How = "reset"
    flip_at: tuple[int, ...] = ()  # offsets of bytes in which one bit is inverted
    flip_share: float = 0.0  # of large chunks that get one inverted bit somewhere
    flip_from_bytes: int = 4096  # what large is: in chunks of this size nearly all is payload, not framing
    duplicate_share: float = 0.0  # of chunks that are sent twice
    swap_share: float = 0.0  # of chunks that change place with the next one
    blackhole: Literal["", "stall", "drop"] = ""  # stall: read nothing; drop: read and forget everything
    max_faults: int | None = None  # cuts, flips, duplicates and swaps in all; harmless after that many


NONE = Faults()


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forward: Faults = NONE
    backward: Faults = NONE
    refusing: bool = False
    cut: How | None = None  # every open connection, now


class Severed(Exception):
    def __init__(self, how: How) -> None:
        self.how: How = how


class Direction:
    """The faults of one direction of the relay, shared by its connections."""

    def __init__(self, seed: int) -> None:
        self.faults = NONE
        self.epoch = 0  # grows each time the faults are set
        self.num_faults = 0
        self.random = random.Random(seed)
        self.flowing = asyncio.Event()
        self.flowing.set()

    def set(self, faults: Faults) -> None:
        self.faults = faults
        self.epoch += 1
        self.num_faults = 0
        (self.flowing.clear if faults.blackhole == "stall" else self.flowing.set)()

    def strike(self, share: float) -> bool:
        """Whether chance, and the number left, want a fault here."""
        return share > 0 and self.may_strike and self.random.random() < share

    @property
    def may_strike(self) -> bool:
        return self.faults.max_faults is None or self.num_faults < self.faults.max_faults


class Pump:
    """Moves the bytes of one direction of one connection, from ``source`` to ``sink``."""

    def __init__(
        self,
        direction: Direction,
        source: socket.socket,
        sink: socket.socket,
        count: Callable[[str, int], None],
    ) -> None:
        self._direction = direction
        self._source = source
        self._sink = sink
        self._count = count
        self._queue: asyncio.Queue[tuple[float, bytes | How]] = asyncio.Queue(MAX_QUEUED_CHUNKS)
        self._loop = asyncio.get_running_loop()
        self._epoch = direction.epoch
        self._offset = 0  # since the faults were set
        self._held = b""  # a chunk that waits for the next one to pass
        self._last_due = 0.0
        self._free_at = 0.0  # when the rate allows the next byte

    async def read(self) -> None:
        while True:
            await self._direction.flowing.wait()
            chunk = await self._loop.sock_recv(self._source, CHUNK_BYTES)
            if not chunk:
                await self._put(self._take_held())
                return await self._put(b"")
            if self._epoch != self._direction.epoch:
                self._epoch, self._offset = self._direction.epoch, 0
            if self._direction.faults.blackhole == "drop":
                self._count("dropped_bytes", len(chunk))
                continue
            await self._pass_on(chunk)

    async def write(self) -> None:
        while True:
            due, item = await self._queue.get()
            await asyncio.sleep(max(0.0, max(due, self._free_at) - self._loop.time()))
            await self._direction.flowing.wait()
            if isinstance(item, str):
                raise Severed(item)
            if not item:
                with suppress(OSError):
                    self._sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(self._sink, item)
            self._count("bytes", len(item))
            if rate := self._direction.faults.bytes_per_s:
                self._free_at = max(self._free_at, self._loop.time()) + len(item) / rate

    async def _pass_on(self, chunk: bytes) -> None:
        faults, direction = self._direction.faults, self._direction
        start, self._offset = self._offset, self._offset + len(chunk)
        cut_at = faults.cut_after_bytes
        if cut_at is not None and self._offset >= cut_at and direction.may_strike:
            self._strike("cuts")
            if cut_at > start:
                await self._put(chunk[: cut_at - start])
            return await self._put(faults.cut)
        chunk = self._flip(chunk, start)
        if self._held:
            await self._put(chunk)
            return await self._put(self._take_held())
        if direction.strike(faults.swap_share):
            self._strike("swaps")
            self._held = chunk
            return
        await self._put(chunk)
        if direction.strike(faults.duplicate_share):
            self._strike("duplicates")
            await self._put(chunk)

    def _flip(self, chunk: bytes, start: int) -> bytes:
        faults = self._direction.faults
        places = [at - start for at in faults.flip_at if start <= at < start + len(chunk)]
        if len(chunk) >= faults.flip_from_bytes and self._direction.strike(faults.flip_share):
            places.append(self._direction.random.randrange(len(chunk)))
        altered = bytearray(chunk)
        for place in places:
            if self._direction.may_strike:
                self._strike("flips")
                altered[place] ^= 0x40
        return bytes(altered)

    def _take_held(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _strike(self, kind: str) -> None:
        self._direction.num_faults += 1
        self._count(kind, 1)

    async def _put(self, item: bytes | How) -> None:
        faults = self._direction.faults
        due = self._loop.time() + faults.delay_s + self._direction.random.uniform(0, faults.jitter_s)
        self._last_due = max(self._last_due, due)
        await self._queue.put((self._last_due, item))


class Relay:
    """``counts``: connections, refused, unreachable, and with the prefix ``forward_`` or ``backward_`` bytes,
    dropped_bytes, cuts, flips, duplicates and swaps."""

    def __init__(self, target: Address, listen: Address = ANY_PORT, seed: int = 0) -> None:
        self.target = target
        self.counts: Counter[str] = Counter()
        self._listener = socket.create_server(listen, backlog=256)
        self._listener.setblocking(False)
        self.address = Address(*self._listener.getsockname()[:2])
        self._refusing = False
        self._open: dict[asyncio.Task[None], How | None] = {}  # with how ``cut`` wants them to end
        self._thread = LoopThread(f"relay {self.address}")
        self._forward, self._backward = self._do(self._start(seed))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def set(self, forward: Faults = NONE, backward: Faults = NONE, refusing: bool = False) -> None:
        """Replace all faults; ``refusing`` resets new connections at once."""

        async def apply() -> None:
            self._forward.set(forward)
            self._backward.set(backward)
            self._refusing = refusing

        self._do(apply())

    def cut(self, how: How = "reset") -> None:
        """End every open connection, both ways."""

        async def apply() -> None:
            for task in self._open:
                self._open[task] = how
                task.cancel()

        self._do(apply())

    def close(self) -> None:
        self._thread.close()
        self._listener.close()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop).result(CALL_TIMEOUT_S)

    async def _start(self, seed: int) -> tuple[Direction, Direction]:
        self._accepting = asyncio.get_running_loop().create_task(self._accept())
        return Direction(seed), Direction(seed + 1)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            self.counts["connections"] += 1
            if self._refusing:
                self.counts["refused"] += 1
                end(client, "reset")
                continue
            task = loop.create_task(self._serve(client))
            self._open[task] = None
            task.add_done_callback(lambda done: self._open.pop(done))

    async def _serve(self, client: socket.socket) -> None:
        how: How = "close"
        target = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            client.setblocking(False)
            target.setblocking(False)
            for each in (client, target):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(target, self.target)
            await self._pump(client, target)
        except* Severed as group:
            how = next(error.how for error in group.exceptions if isinstance(error, Severed))
        except* OSError:
            how = "reset"
            self.counts["broken"] += 1
        finally:
            task = asyncio.current_task()
            assert task is not None
            how = self._open[task] or how
            end(client, how)
            end(target, how)

    async def _pump(self, client: socket.socket, target: socket.socket) -> None:
        forward = Pump(self._forward, client, target, self._counter("forward"))
        backward = Pump(self._backward, target, client, self._counter("backward"))
        async with asyncio.TaskGroup() as tasks:
            for pump in (forward, backward):
                tasks.create_task(pump.read())
                tasks.create_task(pump.write())

    def _counter(self, direction: str) -> Callable[[str, int], None]:
        def count(kind: str, number: int) -> None:
            self.counts[f"{direction}_{kind}"] += number

        return count


def end(connection: socket.socket, how: How) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="relay")
    parser.add_argument("--listen", type=Address.parse, default=ANY_PORT)
    parser.add_argument("--target", type=Address.parse, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with Relay(options.target, options.listen, options.seed) as relay:
        print(msgspec.json.encode({"listening": str(relay.address)}).decode(), flush=True)
        for line in sys.stdin:
            command = msgspec.json.decode(line, type=Command)
            relay.set(command.forward, command.backward, command.refusing)
            if command.cut is not None:
                relay.cut(command.cut)
            print(msgspec.json.encode(dict(relay.counts)).decode(), flush=True)


if __name__ == "__main__":
    main()
