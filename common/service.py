"""A worker's conversation with its proxies, the same for both roles.

A request is *owned* by the proxy session it came by, from Generate (or a hand-over) until one of: its
terminal Tokens, the hand-over to another worker, or the loss of the session, which aborts it. Every Generate
is answered with exactly one terminal Tokens by this worker or by the one it was handed to."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from msgspec import structs

from common.block_news import BlockNews, Book
from common.channel import ProxyChannel
from common.config import StopConfig, WorkerConfig
from common.messages import (
    Abort,
    Drain,
    Generate,
    Outputs,
    Refusal,
    Refused,
    Status,
    Tokens,
    ToProxy,
    ToWorker,
    WorkerError,
)
from common.proxies import Proxies
from common.secret import Secret
from common.sequence import SequenceKey

logger = logging.getLogger(__name__)

BLOCK_NEWS_INTERVAL_S = 0.05  # between messages about the prefix cache at least
GREETING_S = 0.01  # between the first two messages to a proxy; then twice that, and so on up to a beat
FLUSH_S = 1.0  # for the last tokens of a drained worker to leave


class Role(Protocol):
    """What a prefill or decode worker does with what proxies say."""

    def status(self, draining: bool) -> Status: ...

    def generate(self, message: Generate) -> None:
        """Take the request in; raises ``Refusal``."""
        ...

    def abort(self, key: SequenceKey, reason: str) -> None:
        """Stop work on it wherever it is; unknown keys are ignored."""
        ...

    def idle(self) -> bool:
        """Nothing is under way: a draining worker may exit."""
        ...

    def drain(self) -> None:
        """From now on only finish what is under way."""
        ...


class Service:
    """Runs in the worker's main event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        stop: StopConfig,
        incarnation: str,
        role: Role,
        book: Book,
        secret: Secret | None = None,
        discovery: str = "",
    ) -> None:
        """``discovery``: as in ``NetworkConfig``."""
        self._interval_s = config.heartbeat_interval_s
        self._locality = config.locality_labels()
        self._block_news = BlockNews(book)
        self._stepped = asyncio.Event()
        self._drain_timeout_s = stop.drain_timeout_s
        self._role = role
        self._proxies = Proxies(config.proxies, discovery, incarnation, secret)
        self._owners: dict[SequenceKey, ProxyChannel] = {}
        self._draining = False
        self._cut = False  # the time to drain is over
        self._beat = asyncio.Event()
        self.num_dropped = 0  # outputs that a lost proxy session could not take

    @property
    def num_requests(self) -> int:
        return len(self._owners)

    async def run(self) -> None:
        """Serve until drained."""
        async with asyncio.TaskGroup() as tasks:
            talks = tasks.create_task(self._proxies.talk(self._converse))
            news = tasks.create_task(self._tell_blocks())
            await self._heartbeat()
            self._proxies.flush_s = FLUSH_S
            talks.cancel()
            news.cancel()

    def drain(self) -> None:
        """Take no new work; ``run`` returns when nothing is under way, or when the drain time is over."""
        if self._draining:
            return
        logger.info("draining: %d requests under way", len(self._owners))
        self._draining = True
        self._role.drain()
        asyncio.get_running_loop().call_later(self._drain_timeout_s, self._cut_off)
        self._beat.set()

    def status(self) -> Status:
        """May be called in any thread."""
        status = self._role.status(self._draining)
        return structs.replace(status, locality=status.locality | self._locality)

    def owns(self, key: SequenceKey) -> bool:
        return key in self._owners

    def adopt(self, key: SequenceKey, proxy: str) -> None:
        """Own a request that another worker hands over; raises ``Refusal`` where its proxy is not known."""
        for channel in self._proxies.channels:
            if channel.proxy_incarnation == proxy:
                self._owners[key] = channel
                return
        raise Refusal("peer_lost", f"decode worker has no connection to proxy {proxy}")

    def forget(self, key: SequenceKey) -> None:
        """The request was handed to another worker, which owes the rest."""
        self._owners.pop(key, None)

    def fail(self, key: SequenceKey, error: WorkerError) -> None:
        """End the request with an error; nothing happens if it has ended already."""
        self.publish([Tokens(key.request_id, key.attempt, 0, finish_reason="error", error=error)])

    def publish(self, outputs: Iterable[Tokens]) -> None:
        """Send to each proxy what belongs to it, in one message. What nobody owns any more is left out."""
        self._stepped.set()
        batches: dict[ProxyChannel, list[Tokens]] = defaultdict(list)
        for tokens in outputs:
            key = SequenceKey(tokens.request_id, tokens.attempt)
            channel = self._owners.get(key)
            if channel is None:
                continue
            batches[channel].append(tokens)
            if tokens.finish_reason is not None:
                del self._owners[key]
        for channel, batch in batches.items():
            self._send(channel, Outputs(tuple(batch)))

    def announce(self, message: ToProxy) -> None:
        """Tell every proxy."""
        for channel in self._proxies.channels:
            self._send(channel, message)

    def _send(self, channel: ProxyChannel, message: ToProxy) -> None:
        try:
            channel.send(message)
        except ConnectionError:
            if isinstance(message, Outputs):
                self.num_dropped += len(
                    message.tokens
                )  # the session is lost: its requests are about to be aborted

    async def _converse(self, channel: ProxyChannel) -> None:
        """Until the session is lost."""
        greeting = asyncio.create_task(self._greet(channel))
        try:
            while True:
                self._hear(channel, await channel.receive())
        except ConnectionError as error:
            self._block_news.forget(channel)
            num_aborted = self._abort_all(channel, "proxy lost")
            level = logging.WARNING if num_aborted else logging.INFO  # a proxy that stops is no trouble
            logger.log(level, "%s; %d of its requests are aborted", error, num_aborted)
        finally:
            greeting.cancel()

    async def _greet(self, channel: ProxyChannel) -> None:
        """What is said before the connection is made is lost, and the next beat may be far."""
        pause_s = GREETING_S
        while channel.proxy_incarnation is None and pause_s < self._interval_s:
            self._send(channel, self.status())
            await asyncio.sleep(pause_s)
            pause_s *= 2

    def _hear(self, channel: ProxyChannel, message: ToWorker) -> None:
        match message:
            case Generate():
                self._generate(channel, message)
            case Abort(request_id=request_id, attempt=attempt):
                self._role.abort(SequenceKey(request_id, attempt), "aborted by the proxy")
            case Drain():
                self.drain()
            case Refused(reason=reason):
                logger.error("proxy %s refuses this worker: %s", channel.address, reason)
            case _:
                pass

    def _generate(self, channel: ProxyChannel, message: Generate) -> None:
        key = SequenceKey(message.request_id, message.attempt)
        if key in self._owners:
            logger.warning("repeated Generate for %s is ignored", key)
            return
        self._owners[key] = channel
        try:
            if self._draining:
                raise Refusal("draining", "worker is draining")
            self._role.generate(message)
        except Refusal as refusal:
            self.fail(key, refusal.error)

    def _abort_all(self, channel: ProxyChannel, reason: str) -> int:
        keys = [key for key, owner in self._owners.items() if owner is channel]
        for key in keys:
            del self._owners[key]
            self._role.abort(key, reason)
        return len(keys)

    async def _heartbeat(self) -> None:
        """Status on a timer and whenever ``drain`` asks; ends when a drain is complete."""
        while True:
            self.announce(self.status())
            self._stepped.set()
            if self._draining and not self._owners and (self._cut or self._role.idle()):
                return
            self._beat.clear()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._beat.wait()
            except TimeoutError:
                pass

    async def _tell_blocks(self) -> None:
        """After steps, but not after each."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            is_open = [channel for channel in self._proxies.channels if channel.proxy_incarnation is not None]
            for channel, message in self._block_news.take(is_open):
                self._send(channel, message)
            await asyncio.sleep(BLOCK_NEWS_INTERVAL_S)

    def _cut_off(self) -> None:
        """The drain time is over: end what is left with an error, so that its proxy can try elsewhere. A
        hand-over that is still on its way ends with this process."""
        self._cut = True
        for key in list(self._owners):
            self.fail(key, WorkerError("draining", "worker stops: drain time is over"))
            self._role.abort(key, "drain time is over")
        self._beat.set()
