"""The same two questions put to any way of moving bytes between two processes: how fast, and how soon.

A ``Pipe`` is the asking side. The answering side runs in a process of its own, pinned to another core. Both
sides walk through a region that is larger than the caches, as the blocks of a KV cache are.
"""

import asyncio
import mmap
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection as Control
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from common.loop_thread import LoopThread
from kv_transfer import transport
from kv_transfer.transport import Connection

REGION_BYTES = 64 << 20
START_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 120.0  # of one stream or series of pings
_ASK = struct.Struct(">BQQ")  # question, bytes per message, number of messages
_CPU = struct.Struct(">d")
STREAM, ECHO, END = 1, 2, 3
Result = TypeVar("Result")


class Flow(NamedTuple):
    """How one stream of messages went."""

    seconds: float
    cpu_s: float  # of both sides


class Pipe(Protocol):
    def stream(self, piece_bytes: int, count: int) -> Flow:
        """Send ``count`` pieces one way, until the other side has them all."""
        ...

    def ping(self, message_bytes: int, count: int) -> list[float]:
        """Seconds to the other side: half of each round trip."""
        ...

    def close(self) -> None: ...


class Region:
    """Memory to send from or to receive into, piece after piece."""

    def __init__(self) -> None:
        self._view = memoryview(mmap.mmap(-1, REGION_BYTES))  # aligned as a cache is
        self._view[:] = os.urandom(1 << 20) * (REGION_BYTES >> 20)
        self._at = 0

    def piece(self, piece_bytes: int) -> memoryview:
        if self._at + piece_bytes > REGION_BYTES:
            self._at = 0
        start, self._at = self._at, self._at + piece_bytes
        return self._view[start : self._at]


class Memory:
    """Copying within one process: what no pipe can beat."""

    def __init__(self) -> None:
        self._source, self._target = Region(), Region()

    def stream(self, piece_bytes: int, count: int) -> Flow:
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            self._copy(piece_bytes)
        return Flow(time.perf_counter() - started, time.process_time() - cpu)

    def ping(self, message_bytes: int, count: int) -> list[float]:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._copy(message_bytes)
            times.append(time.perf_counter() - started)
        return times

    def close(self) -> None:
        pass

    def _copy(self, piece_bytes: int) -> None:
        source, target = self._source.piece(piece_bytes), self._target.piece(piece_bytes)
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Answerer:
    """The process at the other end. ``serve`` runs there; it sends the address it listens on."""

    def __init__(self, serve: Callable[[Control, str], None], address: str, core: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_pinned, args=(serve, theirs, address, core), daemon=True)
        self._process.start()
        theirs.close()
        if not ours.poll(START_TIMEOUT_S):
            self.close()
            raise TimeoutError(f"the other side of {address} did not start within {START_TIMEOUT_S:g} s")
        self.address: str = ours.recv()

    def close(self) -> None:
        """Wait until the process has ended, as it does once it was told to; a moment later it is killed."""
        self._process.join(timeout=5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _pinned(serve: Callable[[Control, str], None], control: Control, address: str, core: int) -> None:
    os.sched_setaffinity(0, {core})
    serve(control, address)


class RawSocket:
    """A blocking stream socket, TCP or Unix: what the kernel gives."""

    def __init__(self, address: str, core: int) -> None:
        self._answerer = Answerer(serve_raw, address, core)
        self._socket = _socket_of(address)
        self._socket.settimeout(RUN_TIMEOUT_S)
        self._socket.connect(_place_of(self._answerer.address))
        self._region = Region()

    def stream(self, piece_bytes: int, count: int) -> Flow:
        started, cpu = time.perf_counter(), time.process_time()
        self._socket.sendall(_ASK.pack(STREAM, piece_bytes, count))
        for _ in range(count):
            self._socket.sendall(self._region.piece(piece_bytes))
        answer = bytearray(_CPU.size)
        _receive_exactly(self._socket, memoryview(answer))
        own = time.process_time() - cpu
        return Flow(time.perf_counter() - started, own + float(_CPU.unpack(answer)[0]))

    def ping(self, message_bytes: int, count: int) -> list[float]:
        self._socket.sendall(_ASK.pack(ECHO, message_bytes, count))
        times = []
        for _ in range(count):
            piece = self._region.piece(message_bytes)
            started = time.perf_counter()
            self._socket.sendall(piece)
            _receive_exactly(self._socket, piece)
            times.append((time.perf_counter() - started) / 2)
        return times

    def close(self) -> None:
        self._socket.sendall(_ASK.pack(END, 0, 0))
        self._socket.close()
        self._answerer.close()


def serve_raw(control: Control, address: str) -> None:
    listener = _socket_of(address)
    listener.bind(_place_of(address))
    listener.listen(1)
    control.send(f"tcp:{listener.getsockname()[1]}" if address.startswith("tcp:") else address)
    peer, _ = listener.accept()
    region, ask = Region(), bytearray(_ASK.size)
    while True:
        _receive_exactly(peer, memoryview(ask))
        question, size, count = _ASK.unpack(ask)
        if question == END:
            return
        cpu = time.process_time()
        for _ in range(count):
            piece = region.piece(size)
            _receive_exactly(peer, piece)
            if question == ECHO:
                peer.sendall(piece)
        if question == STREAM:
            peer.sendall(_CPU.pack(time.process_time() - cpu))


def _socket_of(address: str) -> socket.socket:
    if address.startswith("unix:"):
        return socket.socket(socket.AF_UNIX)
    new = socket.socket(socket.AF_INET)
    new.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return new


def _place_of(address: str) -> str | tuple[str, int]:
    kind, _, place = address.partition(":")
    return place if kind == "unix" else ("127.0.0.1", int(place))


def _receive_exactly(peer: socket.socket, into: memoryview) -> None:
    received = 0
    while received < into.nbytes:
        count = peer.recv_into(into[received:])
        if count == 0:
            raise ConnectionResetError("the other side has ended")
        received += count


class Transport:
    """A connection of ``kv_transfer.transport``, used as a worker uses it: in an event loop with its own
    thread."""

    def __init__(self, address: str, core: int) -> None:
        self._answerer = Answerer(serve_transport, address, core)
        self._loop = LoopThread("transport")
        self._region = Region()
        self._connection = self._run(transport.connect(self._answerer.address, START_TIMEOUT_S))

    def stream(self, piece_bytes: int, count: int) -> Flow:
        return self._run(self._stream(piece_bytes, count))

    def ping(self, message_bytes: int, count: int) -> list[float]:
        return self._run(self._ping(message_bytes, count))

    def close(self) -> None:
        self._run(self._connection.close())
        self._loop.close()
        self._answerer.close()

    def _run(self, work: Coroutine[None, None, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop.loop).result(RUN_TIMEOUT_S)

    async def _stream(self, piece_bytes: int, count: int) -> Flow:
        started, cpu = time.perf_counter(), time.process_time()
        await self._connection.send(_ASK.pack(STREAM, piece_bytes, count))
        for _ in range(count):
            await self._connection.send(b"", [self._region.piece(piece_bytes)])
        answer, _ = await self._connection.receive()
        own = time.process_time() - cpu
        return Flow(time.perf_counter() - started, own + float(_CPU.unpack(answer)[0]))

    async def _ping(self, message_bytes: int, count: int) -> list[float]:
        await self._connection.send(_ASK.pack(ECHO, message_bytes, count))
        times = []
        for _ in range(count):
            piece = self._region.piece(message_bytes)
            started = time.perf_counter()
            await self._connection.send(b"", [piece])
            await self._connection.receive()
            await self._connection.receive_payload([piece])
            times.append((time.perf_counter() - started) / 2)
        return times


def serve_transport(control: Control, address: str) -> None:
    asyncio.run(_serve_transport(control, address))


async def _serve_transport(control: Control, address: str) -> None:
    ended = asyncio.Event()
    region = Region()

    async def answer(connection: Connection) -> None:
        try:
            while True:
                await _answer_one(connection, region)
        finally:
            ended.set()

    listener = await transport.listen(address, answer)
    control.send(listener.address)
    await ended.wait()
    await listener.close()


async def _answer_one(connection: Connection, region: Region) -> None:
    header, _ = await connection.receive()
    question, size, count = _ASK.unpack(header)
    cpu = time.process_time()
    for _ in range(count):
        piece = region.piece(size)
        await connection.receive()
        await connection.receive_payload([piece])
        if question == ECHO:
            await connection.send(b"", [piece])
    if question == STREAM:
        await connection.send(_CPU.pack(time.process_time() - cpu))


@dataclass(frozen=True, slots=True)
class PipeKind:
    name: str
    is_ours: bool  # a transport of Baton, and not something to compare it with
    open: Callable[[], Pipe]


def kinds(directory: str, core: int) -> list[PipeKind]:
    """Everything that can be measured here. Unix sockets go into ``directory``."""
    found = [
        PipeKind("memcpy", False, Memory),
        PipeKind("raw TCP", False, lambda: RawSocket("tcp:0", core)),
        PipeKind("raw Unix", False, lambda: RawSocket(f"unix:{directory}/raw", core)),
        PipeKind("zmq+tcp", True, lambda: Transport("zmq+tcp://127.0.0.1:0", core)),
        PipeKind("zmq+ipc", True, lambda: Transport(f"zmq+ipc://{directory}/zmq", core)),
    ]
    if "ucx" in transport.available():
        found.append(PipeKind("ucx", True, lambda: Transport("ucx://127.0.0.1:0", core)))
    return found
