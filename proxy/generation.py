"""The endpoints that generate, in front of all others.

They are the path of every request that matters: what a framework does between the connection and an endpoint
costs more than what happens in these, so they do without.
"""

import time
from collections.abc import Awaitable, Callable

from msgspec import structs
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.body import read_body
from proxy.caller import caller_of
from proxy.chat_job import chat_job
from proxy.completion_job import completion_job
from proxy.door import answer
from proxy.errors import ApiError
from proxy.frontend import Frontend
from proxy.job import Job
from proxy.prompts import Limits
from proxy.reply import Reply
from proxy.responses_job import responses_job
from proxy.served_model import ServedModel

Parse = Callable[[bytes, ServedModel, Limits, str], Awaitable[Job]]
ENDPOINTS: dict[str, Parse] = {
    "/v1/completions": completion_job,
    "/v1/chat/completions": chat_job,
    "/v1/responses": responses_job,
}


class Generation:
    def __init__(self, others: ASGIApp, frontend: Frontend) -> None:
        self._others = others
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parse = ENDPOINTS.get(scope["path"]) if scope["type"] == "http" else None
        if parse is None:
            await self._others(scope, receive, send)
            return
        try:
            reply = await self._reply(scope, receive, parse)
        except ApiError as error:
            self._frontend.metrics.refused.labels(error.code).inc()
            await answer(send, error)
        except ClientDisconnect:
            return  # nobody is there to read it
        else:
            await reply.run(receive, send)

    async def _reply(self, scope: Scope, receive: Receive, parse: Parse) -> Reply:
        if scope["method"] != "POST":
            text = f"{scope['path']} does not take {scope['method']}"
            raise ApiError(405, text, code="method_not_allowed", headers={"Allow": "POST"})
        arrived_at = time.monotonic()
        frontend = self._frontend
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body = await read_body(headers, receive, frontend.config.max_body_bytes)
        job = await parse(body, frontend.model, frontend.limits(), headers.get("traceparent", "")[:128])
        caller = caller_of(headers, scope.get("state", {}).get("key", ""), frontend.targets)
        return Reply(frontend, structs.replace(job, caller=caller), arrived_at)
