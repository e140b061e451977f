"""A freshly started system is ready when its proxy says so and all workers have announced themselves."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

_INTERVAL_S = 0.1  # there is no event to wait for: the proxy is another process that may not listen yet


async def wait_ready(url: str, headers: Mapping[str, str], roles: Mapping[str, int]) -> list[dict[str, Any]]:
    """The workers, once there are as many healthy ones as ``roles`` says and requests would be served. Waits
    for ever: the caller sets the time limit."""
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=5.0, trust_env=False) as client:
        while True:
            workers = await _workers_if_ready(client)
            counts = Counter(worker["role"] for worker in workers)
            if all(counts[role] >= count for role, count in roles.items()):
                return workers
            await asyncio.sleep(_INTERVAL_S)


async def _workers_if_ready(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    try:
        if (await client.get("/ready")).status_code != 200:
            return []
        reply = (await client.get("/workers")).raise_for_status()
        return list(reply.json()["workers"])
    except httpx.HTTPError:
        return []
