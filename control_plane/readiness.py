"""A freshly started system is ready when its proxy says so and all workers have announced themselves."""

import asyncio
from collections.abc import Mapping

import httpx

_INTERVAL_S = 0.1  # there is no event to wait for: the proxy is another process that may not listen yet


async def wait_ready(url: str, roles: Mapping[str, int]) -> None:
    """Until requests would be served by at least as many workers as ``roles`` says. Waits for ever: the
    caller sets the time limit."""
    async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
        while not await _is_ready(client, roles):  # noqa: ASYNC110
            await asyncio.sleep(_INTERVAL_S)


async def _is_ready(client: httpx.AsyncClient, roles: Mapping[str, int]) -> bool:
    try:
        reply = await client.get("/ready")
        counts = reply.json()["workers"] if reply.status_code == 200 else {}
    except httpx.HTTPError:
        return False
    return bool(counts) and all(counts.get(role, 0) >= count for role, count in roles.items())
