"""Errors as OpenAI's API shapes them: {"error": {"message", "type", "param", "code"}} and an HTTP status.

Knows the project's error tree and HTTP, nothing of requests.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.types import Send

from inferdbg.engine.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InferdbgError,
    InvalidRequest,
    QueueFull,
)

__all__ = ["ApiError", "api_error_of", "send_error", "send_json"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


# the clients' code → the events' reason, where OpenAI has a longer word
_REASONS = {"context_length_exceeded": "context_length", "request_too_large": "too_large"}


class ApiError(Exception):
    """An answer other than success. `code` is OpenAI's word or one like it; `reason` is what the events say."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        recorded: str | None = None,
        retry_after_seconds: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.recorded = message if recorded is None else recorded  # what the events say
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.close = close  # what is left of the request is not read

    @property
    def reason(self) -> str:
        return _REASONS.get(self.code, self.code)

    def document(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_seconds))).encode("ascii")))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.close:
            headers.append((b"connection", b"close"))
        return headers


def api_error_of(error: InferdbgError) -> ApiError:
    """The HTTP form of an error of the project's tree."""
    match error:
        case ContextLengthExceeded():
            return ApiError(400, str(error), code="context_length_exceeded", param=error.param)
        case InvalidRequest():
            return ApiError(400, str(error), code="invalid_request", param=error.param, recorded=error.recorded)
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", retry_after_seconds=error.retry_after_seconds)
        case EngineUnavailable():
            return ApiError(503, str(error), code="unavailable", retry_after_seconds=1.0)
        case _:
            return ApiError(500, str(error), code="internal_error")


async def send_json(send: Send, status: int, document: Any, headers: list[tuple[bytes, bytes]] | None = None) -> int:
    """Sends a whole JSON response; returns the body's size in bytes."""
    body = msgspec.json.encode(document)
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode("ascii")),
                *(headers or []),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})
    return len(body)


async def send_error(send: Send, error: ApiError, headers: list[tuple[bytes, bytes]] | None = None) -> int:
    """Sends an error as a whole response; returns the body's size in bytes."""
    return await send_json(send, error.status, error.document(), [*error.headers(), *(headers or [])])
