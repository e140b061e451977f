"""What every HTTP request passes, in and out: keys, ids, a line in the log, a last answer for our bugs."""

import hmac
import logging
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.errors import ApiError
from proxy.page import FILES

# For probes, which have no key, and for the page that asks for one.
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/metrics", "/version", *FILES})
MAX_ID_BYTES = 1024

logger = logging.getLogger(__name__)


class _Visit:
    """One HTTP request on its way in and out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = _header(scope, b"x-request-id")
        self.id = given if 0 < len(given) <= MAX_ID_BYTES else secrets.token_hex(16).encode()
        self.status = 0  # until the reply begins
        self._scope = scope
        self._send = send
        self._began_at = time.monotonic()

    @property
    def id_text(self) -> str:
        return self.id.decode("latin-1")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.id)]
        await self._send(message)

    def log(self) -> None:
        """Neither prompts nor keys."""
        path, status = self._scope["path"], self.status or "left"
        level = logging.DEBUG if path in OPEN_PATHS else logging.INFO
        duration_s = time.monotonic() - self._began_at
        text = "%s %s %s %.3f s %r"
        logger.log(level, text, self._scope["method"], path, status, duration_s, self.id_text)


class Door:
    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], admin_keys: tuple[str, ...] = ()) -> None:
        """Without ``api_keys`` everybody may do what needs no administrator."""
        self._app = app
        self._keys = [key.encode() for key in (*api_keys, *admin_keys)]
        self._num_api_keys = len(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = _Visit(scope, send)
        try:
            if self._is_allowed(scope):
                await self._app(scope, receive, visit.send)
            else:
                await answer(visit.send, wrong_key())
        except Exception:
            logger.exception("request %r failed", visit.id_text)
            if not visit.status:
                text = "internal error"
                await answer(visit.send, ApiError(500, text, "internal_error", code="internal_error"))
        finally:
            visit.log()

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        # Every key is compared, in constant time, so that timing tells nothing about any.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or True not in matches:
            return not self._num_api_keys
        state = scope.setdefault("state", {})
        state["key"] = str(matches.index(True))
        state["is_administrator"] = True in matches[self._num_api_keys :]
        return True


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def wrong_key() -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    text = "this server wants a valid API key: Authorization: Bearer KEY"
    return ApiError(401, text, "authentication_error", code="invalid_api_key", headers=headers)


async def answer(send: Send, error: ApiError) -> None:
    body = error.encode()
    fields = {"content-type": "application/json", "content-length": str(len(body))}
    headers = [(name.lower().encode(), value.encode()) for name, value in (fields | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
