"""``/workers``: the workers as this proxy sees them, and what an administrator may do to them.

Drained by one proxy, a worker tells all of them that it leaves. Removal is this proxy's own affair: the
others go on as before.
"""

import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from proxy.body import as_json
from proxy.door import wrong_key
from proxy.errors import ApiError
from proxy.frontend import Frontend
from proxy.registry import Registry
from proxy.worker import Worker


def add_workers(app: FastAPI, frontend: Frontend) -> None:
    registry, dispatcher = frontend.registry, frontend.dispatcher

    @app.get("/workers")
    async def workers() -> Response:
        return as_json({"workers": [_describe(worker) for worker in registry]})

    @app.post("/workers/{name}/drain")
    async def drain(name: str, request: Request) -> Response:
        _require_administrator(request, frontend)
        worker = _find(registry, name)
        if worker.state != "ready":
            text = f"worker {worker.name} is {worker.state}: it would not hear of it"
            raise ApiError(409, text, param="name", code="worker_not_ready")
        dispatcher.drain(worker)
        return as_json(_describe(worker), 202)

    @app.delete("/workers/{name}")
    async def remove(name: str, request: Request) -> Response:
        _require_administrator(request, frontend)
        worker = _find(registry, name)
        dispatcher.remove(worker)
        return as_json(_describe(worker))


def _require_administrator(request: Request, frontend: Frontend) -> None:
    state = request.scope.get("state", {})
    if state.get("is_administrator"):
        return
    if frontend.config.admin_key and "key" not in state:
        raise wrong_key()
    what = "the key is none" if frontend.config.admin_key else "this server has none"
    text = f"this takes an --admin-key, and {what}"
    raise ApiError(403, text, "permission_error", code="admin_key_required")


def _find(registry: Registry, name: str) -> Worker:
    found = registry.named(name)
    if not found:
        raise ApiError(404, f"there is no worker {name!r}", param="name", code="worker_not_found")
    if len(found) > 1:
        text = f"{len(found)} workers are called {name!r}; name one by its incarnation"
        raise ApiError(409, text, param="name", code="worker_ambiguous")
    return found[0]


def _describe(worker: Worker) -> dict[str, Any]:
    status = worker.status
    return {
        "name": worker.name,
        "role": worker.role,
        "state": worker.shown_state,
        "reason": worker.reason or None,
        "trusted": worker.breaker.allows(time.monotonic()),
        "incarnation": worker.incarnation,
        "pid": status.pid,
        "address": status.address or None,
        "heard_s_ago": round(time.monotonic() - worker.heard_at, 3),
        "attempts": len(worker.charges),
        "max_sequence_tokens": status.max_sequence_tokens,
        "model": msgspec.to_builtins(status.model),
        "layout": msgspec.to_builtins(status.layout),
        "load": msgspec.to_builtins(status.load),
        "counters": status.counters,
    }
