"""Copying between lists of buffers that are cut in different places."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

Buffer = bytes | bytearray | memoryview
Copy = Callable[[memoryview, memoryview], None]  # from, to
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def flat(buffers: Iterable[Buffer]) -> Iterator[memoryview]:
    """The buffers as views of bytes, without the empty ones. Each must be contiguous."""
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes:
            yield view.cast("B")


def size_of(buffers: Iterable[Buffer]) -> int:
    """Bytes of all of them together."""
    return sum(buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) for buffer in buffers)


def copy(source: memoryview, target: memoryview) -> None:
    # numpy lets go of the interpreter lock while it copies; a slice assignment would stop the engine's
    # thread.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def scatter(source: Iterable[Buffer], into: Iterable[Buffer], copy: Copy = copy) -> None:
    """Write the bytes of ``source``, one after the other, into ``into``; both have the same size in total."""
    targets = flat(into)
    target = memoryview(b"")
    for piece in flat(source):
        while piece.nbytes:
            target = target if target.nbytes else next(targets)
            count = min(piece.nbytes, target.nbytes)
            copy(piece[:count], target[:count])
            piece, target = piece[count:], target[count:]


def cut(buffers: Sequence[Buffer], piece_bytes: int, gather_bytes: int) -> Iterator[Buffer]:
    """The same bytes in pieces of at most ``piece_bytes``; neighbours that are smaller than ``gather_bytes``
    are put together, since each piece has its own cost."""
    small: list[memoryview] = []
    small_bytes = 0
    for view in flat(buffers):
        if small and (view.nbytes >= gather_bytes or small_bytes + view.nbytes > piece_bytes):
            yield b"".join(small)
            small, small_bytes = [], 0
        if view.nbytes < gather_bytes:
            small.append(view)
            small_bytes += view.nbytes
        else:
            yield from (view[start : start + piece_bytes] for start in range(0, view.nbytes, piece_bytes))
    if small:
        yield b"".join(small)


def keep_freed_memory() -> None:
    """Let the C library keep freed buffers of some megabytes for the next message. By default it gives them
    back to the kernel each time, and the page faults of getting them again take a quarter of a transfer's CPU
    time."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc has it, others need not
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
