"""etcd by its HTTP/JSON gateway (API v3): as much of it as discovery takes.

Keys and values are text here. On the wire they are base64, and whole numbers of 64 bits are strings, as in
protobuf's JSON. Every call tries all endpoints, the one that answered last first, and has ended after
``CALL_S`` for each of them.
"""

import asyncio
from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec
from msgspec import Struct

CALL_S = 2.0
WATCH_S = 30.0  # a connection that died in silence is not waited at for longer

Json = dict[str, Any]


class EtcdError(Exception):
    """No endpoint answered, or not as etcd does; the text names the last one."""


class Found(NamedTuple):
    keys: frozenset[str]
    revision: int  # of the store


# What is looked at in answers. A field of value 0 is left out of them.


class _Done(Struct):
    pass


class _Granted(Struct):
    ID: str


class _Lease(Struct):
    TTL: str = "0"


class _Renewed(Struct):
    result: _Lease


class _Header(Struct):
    revision: str


class _Entry(Struct):
    key: bytes  # from base64


class _Entries(Struct):
    header: _Header
    kvs: tuple[_Entry, ...] = ()


class _Watch(Struct):
    events: tuple[msgspec.Raw, ...] = ()
    canceled: bool = False


class _Watched(Struct):
    result: _Watch


Answer = TypeVar("Answer")


class Etcd:
    def __init__(self, endpoints: Sequence[str]) -> None:
        """``endpoints`` are URLs such as http://host:2379."""
        self._endpoints = deque(endpoints)
        # Certificates take most of a second to load, and there is no TLS here.
        self._http = httpx.AsyncClient(timeout=CALL_S, trust_env=False, verify=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def grant(self, ttl_s: int) -> str:
        """A lease: what is stored under it lasts for ``ttl_s`` after its last renewal."""
        return (await self._call("lease/grant", {"TTL": ttl_s}, _Granted)).ID

    async def renew(self, lease: str) -> bool:
        """False when it has run out."""
        return (await self._call("lease/keepalive", {"ID": lease}, _Renewed)).result.TTL != "0"

    async def revoke(self, lease: str) -> None:
        """What is stored under it goes at once."""
        await self._call("lease/revoke", {"ID": lease}, _Done)

    async def put(self, key: str, value: str, lease: str) -> None:
        await self._call("kv/put", {"key": _coded(key), "value": _coded(value), "lease": lease}, _Done)

    async def keys(self, prefix: str) -> Found:
        """All keys that begin with ``prefix``."""
        entries = await self._call("kv/range", _range(prefix) | {"keys_only": True}, _Entries)
        keys = frozenset(entry.key.decode(errors="replace") for entry in entries.kvs)
        return Found(keys, int(entries.header.revision))

    async def change(self, prefix: str, revision: int) -> None:
        """Returns once something under ``prefix`` has changed since ``revision``, or after ``WATCH_S``."""
        request = {"create_request": _range(prefix) | {"start_revision": str(revision + 1)}}
        try:
            async with asyncio.timeout(WATCH_S):
                await self._watch(request)
        except TimeoutError:
            return
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise self._failed(error) from error

    async def _watch(self, request: Json) -> None:
        url, patience = f"{self._endpoints[0]}/v3/watch", httpx.Timeout(CALL_S, read=None)
        async with self._http.stream("POST", url, json=request, timeout=patience) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                told = msgspec.json.decode(line, type=_Watched).result
                if told.events or told.canceled:  # the latter: too long ago, so that much has changed
                    return
        raise httpx.RemoteProtocolError("the watch has ended")

    async def _call(self, path: str, body: Json, kind: type[Answer]) -> Answer:
        """The answer; EtcdError."""
        failure = EtcdError("there is no endpoint")
        for _ in range(len(self._endpoints)):
            try:
                async with asyncio.timeout(CALL_S):
                    reply = await self._http.post(f"{self._endpoints[0]}/v3/{path}", json=body)
                reply.raise_for_status()
                return msgspec.json.decode(reply.content, type=kind)
            except (httpx.HTTPError, TimeoutError, msgspec.MsgspecError) as error:
                failure = self._failed(error)
        raise failure

    def _failed(self, error: Exception) -> EtcdError:
        """Of the first endpoint; the next one is tried from now on."""
        failure = EtcdError(f"{self._endpoints[0]}: {_told(error)}")
        self._endpoints.rotate(-1)
        return failure


def _told(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    return str(error) or f"no answer within {CALL_S:g} s"


def _range(prefix: str) -> Json:
    """From ``prefix`` to the first key that does not begin with it."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return {"key": _coded(prefix), "range_end": _coded(end)}


def _coded(text: str) -> str:
    return b64encode(text.encode()).decode()
