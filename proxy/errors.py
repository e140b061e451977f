"""What a client is told when it does not get its reply: HTTP status and OpenAI's error object."""

from typing import Any, NamedTuple

import msgspec

from common.messages import ErrorCode, WorkerError


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str = "invalid_request",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())


class _Answer(NamedTuple):
    status: int
    kind: str
    code: str
    retry_after: bool = False


_ANSWERS: dict[ErrorCode, _Answer] = {
    "invalid": _Answer(400, "invalid_request_error", "invalid_request"),
    "overloaded": _Answer(429, "rate_limit_error", "overloaded", retry_after=True),
    "deadline": _Answer(504, "timeout_error", "deadline_exceeded"),
    "peer_lost": _Answer(503, "service_unavailable_error", "no_worker", retry_after=True),
    "draining": _Answer(503, "service_unavailable_error", "draining", retry_after=True),
    "internal": _Answer(500, "internal_error", "internal_error"),
}


def from_worker(error: WorkerError, retry_after_s: int = 1) -> ApiError:
    status, kind, code, retry_after = _ANSWERS[error.code]
    headers = {"Retry-After": str(retry_after_s)} if retry_after else None
    return ApiError(status, error.message, kind, None, code, headers)


def invalid(param: str | None, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(param: str) -> ApiError:
    return ApiError(
        400, f"{param} is not supported by this server", param=param, code="unsupported_parameter"
    )


def context_length_exceeded(limit: int, num_prompt: int, num_output: int, what: str, param: str) -> ApiError:
    # Clients that shorten their prompt and try again look for these words.
    beginning = "the prompt is too long: " if num_prompt >= limit else ""
    num_tokens = num_prompt + num_output
    text = (
        f"{beginning}{num_prompt} tokens in the prompt and {num_output} for the output: {num_tokens} "
        f"is longer than the model's context length here, {limit}, set by {what}"
    )
    return ApiError(400, text, param=param, code="context_length_exceeded")


def too_many_requests(limit: int) -> ApiError:
    text = f"{limit} requests are under way, which is the limit of this server"
    return ApiError(429, text, "rate_limit_error", None, "overloaded", {"Retry-After": "1"})
