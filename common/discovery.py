"""How workers find proxies that nobody named to them: through etcd.

A proxy stores the address of its control channel under a lease, at PREFIX/proxies/ADDRESS; a worker watches
these keys and talks to whoever stands there. That is all etcd is for: who is alive and what they have to do
is told over the control channel, so that all goes on while etcd is away.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from common.config import CONTROL_ADDRESS
from common.etcd import Etcd, EtcdError

TTL_S = 10  # how long a proxy that died without a word is still looked for
PAUSE_S = (0.5, 5.0)  # first and longest between two attempts to reach etcd

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    endpoints: tuple[str, ...]
    prefix: str  # of the keys, with a slash at its end

    @classmethod
    def parse(cls, text: str) -> "Place":
        """As ``NetworkConfig`` has checked it: etcd://HOST:PORT,.../PREFIX."""
        hosts, _, prefix = text.removeprefix("etcd://").partition("/")
        path = "/".join(part for part in prefix.split("/") if part) or "baton"
        return cls(tuple(f"http://{host}" for host in hosts.split(",")), f"{path}/proxies/")


async def announce(place: Place, address: str, ttl_s: int = TTL_S) -> None:
    """Keep ``address`` where workers look for it, until cancelled."""
    etcd = Etcd(place.endpoints)
    lease = ""

    async def step() -> None:
        nonlocal lease
        if lease and not await etcd.renew(lease):
            lease = ""
        if not lease:
            granted = await etcd.grant(ttl_s)
            await etcd.put(place.prefix + address, address, granted)
            lease = granted
            logger.info("workers find this proxy, %s, by way of etcd", address)

    try:
        await _keep_doing(step, pause_s=ttl_s / 3)
    finally:
        if lease:
            with contextlib.suppress(EtcdError):  # then it runs out by itself
                await etcd.revoke(lease)
        await etcd.close()


async def follow(place: Place, found: Callable[[frozenset[str]], None]) -> None:
    """Tell ``found`` the addresses of all proxies, now and whenever they change, until cancelled."""
    etcd = Etcd(place.endpoints)
    revision = 0

    async def step() -> None:
        nonlocal revision
        since, revision = revision, 0
        if since:
            await etcd.change(place.prefix, since)
        keys, revision = await etcd.keys(place.prefix)
        addresses = {key.removeprefix(place.prefix) for key in keys}
        found(frozenset(filter(CONTROL_ADDRESS.fullmatch, addresses)))

    try:
        await _keep_doing(step, pause_s=0.0)
    finally:
        await etcd.close()


async def _keep_doing(step: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """For ever. That etcd is away is told once, and so is that it is back."""
    is_away, patience_s = False, PAUSE_S[0]
    while True:
        try:
            await step()
        except EtcdError as error:
            if not is_away:
                logger.warning("etcd cannot be reached, what is known stays: %s; trying on", error)
            is_away = True
            await asyncio.sleep(patience_s * random.uniform(0.5, 1.0))  # not all at once
            patience_s = min(2 * patience_s, PAUSE_S[1])
            continue
        if is_away:
            logger.info("etcd answers again")
        is_away, patience_s = False, PAUSE_S[0]
        await asyncio.sleep(pause_s)
