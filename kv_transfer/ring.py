"""Memory that two processes of one machine share, so that a payload is copied once by each and never by the
kernel.

The side that connects makes a ring, writes payloads into it and sends only where they lie; the side that
listens reads them there. Nobody keeps a list of what is free: payloads are read in the order in which they
were written, and the window of ``kv_transfer.mailbox`` lets no more of them be under way than fit. Nothing
in the ring is trusted: places are checked against its size, contents by whoever checks payloads.

The memory has no name in any file system, so a process that is killed leaves nothing behind. The other side
opens it through the descriptor of the process that made it, which the kernel allows to the same user only.
"""

import fcntl
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Sequence

from kv_transfer.memory import Buffer, Copy, copy, scatter, size_of

TOKEN_BYTES = 16
_WHERE = struct.Struct(f">QQQ{TOKEN_BYTES}s")  # process, descriptor, size, first bytes of the memory
_PLACE = struct.Struct(">QQ")  # offset, size
START = mmap.PAGESIZE  # the token has a page of its own


class Ring:
    """Room for the payloads of one connection, one way. ``capacity`` is three halves of the most that can be
    under way: what does not fit before the end starts anew at the front."""

    def __init__(self, memory: mmap.mmap, descriptor: int | None = None) -> None:
        self._view = memoryview(memory)
        self._descriptor = descriptor
        self._next = START

    @classmethod
    def create(cls, window_bytes: int) -> "Ring | None":
        """None where the system has no such memory, or none left."""
        if sys.platform != "linux":
            return None
        size = START + window_bytes + window_bytes // 2
        try:
            descriptor = os.memfd_create("baton-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, size)  # or writing into it might kill us
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # ... or kill who reads it
            memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            os.close(descriptor)
            return None
        memory[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
        return cls(memory, descriptor)

    @classmethod
    def open(cls, where: Buffer) -> "Ring | None":
        """The ring that another process told of by ``where``; None when it is out of reach, for example in
        another container."""
        try:
            process, number, size, token = _WHERE.unpack(where)
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except (struct.error, OSError):
            return None
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size != size or size <= START:
                return None
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)
        return cls(memory) if memory[:TOKEN_BYTES] == token else None

    @property
    def where(self) -> bytes:
        """For ``open``; holds until ``was_opened``."""
        assert self._descriptor is not None
        return _WHERE.pack(os.getpid(), self._descriptor, len(self._view), bytes(self._view[:TOKEN_BYTES]))

    def was_opened(self) -> None:
        """Also to be called when it never will be."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, payload: Sequence[Buffer], copy: Copy = copy) -> bytes:
        """Copies the payload; returns its place, for ``read``."""
        size = size_of(payload)
        start = self._next if self._next + size <= len(self._view) else START
        self._next = start + size
        scatter(payload, [self._view[start : start + size]], copy)
        return _PLACE.pack(start, size)

    def read(self, place: Buffer) -> memoryview | None:
        """The payload at a place, not copied: it holds until the sender has got its window back. None for a
        place that is none."""
        if len(place) != _PLACE.size:
            return None
        start, size = _PLACE.unpack(place)
        if start < START or size == 0 or start + size > len(self._view):
            return None
        return self._view[start : start + size]
