"""What every HTTP request passes, in and out: keys, ids, a line in the log, a last answer for our bugs."""

import hmac
import logging
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.errors import ApiError

OPEN_PATHS = frozenset(
    {"/health", "/live", "/ready", "/metrics", "/version"}
)  # for probes, which have no key
MAX_ID_BYTES = 1024

logger = logging.getLogger(__name__)


class Door:
    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _header(scope, b"x-request-id")
        if not request_id or len(request_id) > MAX_ID_BYTES:
            request_id = uuid.uuid4().hex.encode()
        status, began = 0, time.monotonic()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            if self._is_allowed(scope):
                await self._app(scope, receive, send_named)
            else:
                await answer(send_named, _wrong_key())
        except Exception:
            logger.exception("request %r failed", request_id.decode("latin-1"))
            if not status:
                await answer(
                    send_named, ApiError(500, "internal error", "internal_error", code="internal_error")
                )
        finally:
            level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
            text = "%s %s %s %.3f s %r"
            duration_s = time.monotonic() - began
            logger.log(
                level,
                text,
                scope["method"],
                scope["path"],
                status or "left",
                duration_s,
                request_id.decode("latin-1"),
            )

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        # Every key is compared, in constant time, so that timing tells nothing about any.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _wrong_key() -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    text = "this server wants a valid API key: Authorization: Bearer KEY"
    return ApiError(401, text, "authentication_error", code="invalid_api_key", headers=headers)


async def answer(send: Send, error: ApiError) -> None:
    body = error.encode()
    fields = {"content-type": "application/json", "content-length": str(len(body))}
    headers = [(name.lower().encode(), value.encode()) for name, value in (fields | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
