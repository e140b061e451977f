"""A freshly started system is ready when its proxies say so and all workers have announced themselves."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

_INTERVAL_S = 0.1  # there is no event to wait for: the proxy is another process that may not listen yet


async def wait_ready(urls: Sequence[str], api_key: str, roles: Mapping[str, int]) -> dict[str, str]:
    """Until each proxy would have requests served by at least as many workers as ``roles`` says: then the
    transfer addresses of workers by name. Waits for ever: the caller sets the time limit."""
    found = await asyncio.gather(*(_wait_ready(url, api_key, roles) for url in urls))
    return found[0]


async def _wait_ready(url: str, api_key: str, roles: Mapping[str, int]) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with _client(url, headers) as client:
        while not _enough(await _get(client, "/ready"), roles):  # noqa: ASYNC110
            await asyncio.sleep(_INTERVAL_S)
        workers = (await _get(client, "/workers")).get("workers", [])
        return {worker["name"]: worker["address"] or "" for worker in workers}


def _client(url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """The certificate is made for the name that clients use, and this asks a process of ours on this
    machine."""
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=5.0, trust_env=False, verify=False)


def _enough(state: dict[str, Any], roles: Mapping[str, int]) -> bool:
    workers = state.get("workers", {})
    return all(workers.get(role, 0) >= count for role, count in roles.items())


async def _get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """The answer; empty while there is none."""
    try:
        reply = await client.get(path)
        return dict(reply.json()) if reply.status_code == 200 else {}
    except httpx.HTTPError:
        return {}
