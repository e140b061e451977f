"""What proxies are told of a worker's prefix cache, so that they know exactly which blocks it holds.

A proxy hears all blocks when its session opens, in messages of bounded size, the first of which says that
what was told before is void; from then on it hears what has changed. Messages of a session arrive in order
and whole, or the session is lost, so there is nothing to number.
"""

from collections.abc import Iterator
from typing import Protocol

from common.channel import ProxyChannel
from common.messages import BlocksRemoved, BlocksStored
from common.pool import CacheEvents

News = BlocksStored | BlocksRemoved

MAX_HASHES = 4096  # in one message, so that a proxy takes it in within a millisecond or two


class Book(Protocol):
    """The engine as seen from here."""

    def take_events(self) -> CacheEvents: ...

    def cached_hashes(self) -> tuple[CacheEvents, tuple[bytes, ...]]: ...


class BlockNews:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._told: set[ProxyChannel] = set()  # know everything up to the last call

    def forget(self, channel: ProxyChannel) -> None:
        """Its session is over: the next one begins anew."""
        self._told.discard(channel)

    def take(
        self, channels: list[ProxyChannel]
    ) -> Iterator[tuple[ProxyChannel, BlocksStored | BlocksRemoved]]:
        """What is to be told to whom, of ``channels`` whose session is open."""
        strangers = [channel for channel in channels if channel not in self._told]
        if strangers:
            events, known = self._book.cached_hashes()
        else:
            events, known = self._book.take_events(), ()
        for channel in [channel for channel in channels if channel in self._told]:
            for message in changes(events):
                yield channel, message
        for channel in strangers:
            self._told.add(channel)
            for message in everything(known):
                yield channel, message


def changes(events: CacheEvents) -> Iterator[News]:
    for removed in _cut(events.removed):
        yield BlocksRemoved(removed)
    for stored in _cut(events.stored):
        yield BlocksStored(stored)


def everything(hashes: tuple[bytes, ...]) -> Iterator[BlocksStored]:
    yield BlocksStored(hashes[:MAX_HASHES], is_first=True)
    for more in _cut(hashes[MAX_HASHES:]):
        yield BlocksStored(more)


def _cut(hashes: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    for first in range(0, len(hashes), MAX_HASHES):
        yield hashes[first : first + MAX_HASHES]
