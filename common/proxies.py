"""The proxies that a worker talks to, each in a task of its own: those that were named to it, or those that
stand in etcd, as they come and go.

What etcd says counts for whom to look for. Who has been found is known better here: a proxy with an open
session is talked to until that is lost, whatever has become of its entry.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

import zmq

from common.channel import ProxyChannel
from common.config import DEFAULT_PROXIES
from common.secret import Secret

UNHEARD_S = 5.0  # proxies that have not answered by then are named

Converse = Callable[[ProxyChannel], Awaitable[None]]  # returns when a session is lost

logger = logging.getLogger(__name__)


class Proxies:
    def __init__(
        self, named: tuple[str, ...], discovery: str, incarnation: str, secret: Secret | None
    ) -> None:
        """``named``: control addresses, none for the default one; not looked at with a ``discovery``, as
        ``NetworkConfig`` has it."""
        self.channels: list[ProxyChannel] = []
        self.flush_s = 0.0  # at the end, for the last messages to leave
        self._named = named
        self._discovery = discovery
        self._incarnation = incarnation
        self._secret = secret
        self._wanted: Collection[str] = ()
        self._talks: dict[str, asyncio.Task[None]] = {}  # by address

    async def talk(self, converse: Converse) -> None:
        """Until cancelled."""
        naming = asyncio.get_running_loop().call_later(UNHEARD_S, self._name_the_unheard)
        try:
            async with asyncio.TaskGroup() as tasks:
                if not self._discovery:
                    self._meet(self._named or DEFAULT_PROXIES, converse, tasks)
                    return
                from common import discovery  # brings an HTTP client, for those alone that want it

                place = discovery.Place.parse(self._discovery)
                await discovery.follow(place, lambda found: self._meet(found, converse, tasks))
        finally:
            naming.cancel()

    def _meet(self, addresses: Collection[str], converse: Converse, tasks: asyncio.TaskGroup) -> None:
        self._wanted = addresses
        for address in sorted(set(addresses) - set(self._talks)):
            try:
                channel = ProxyChannel(address, self._incarnation, secret=self._secret)
            except zmq.ZMQError as error:
                logger.error("proxy %s cannot be talked to: %s", address, error)
                continue
            self.channels.append(channel)
            self._talks[address] = tasks.create_task(self._talk(channel, converse))
        for channel in self.channels:
            if channel.address not in addresses and channel.proxy_incarnation is None:
                self._talks.pop(channel.address).cancel()

    async def _talk(self, channel: ProxyChannel, converse: Converse) -> None:
        try:
            while channel.address in self._wanted:
                await converse(channel)
            self._talks.pop(channel.address)
        finally:
            self.channels.remove(channel)
            channel.close(self.flush_s)
            if channel.address not in self._wanted:
                logger.info("proxy %s is left", channel.address)

    def _name_the_unheard(self) -> None:
        for channel in self.channels:
            if channel.proxy_incarnation is None:
                logger.warning("no proxy has answered at %s yet; trying on", channel.address)
