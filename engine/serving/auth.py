"""Who may call what: the API's key for the API, the administrator's own for administrative routes.

A browser can be made to send a request to 127.0.0.1, so the latter also check Host and Origin.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from inferdbg.engine.config import FrontConfig
from inferdbg.engine.errors import UsageError
from inferdbg.engine.serving.api_errors import ApiError, send_error

__all__ = ["AuthMiddleware", "check_exposure", "is_loopback"]

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})


def is_loopback(host: str) -> bool:
    """Whether a host name or address only reaches this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(config: FrontConfig) -> None:
    """Raises `UsageError` for a server that others could reach without a key."""
    if not is_loopback(config.host) and not config.api_key:
        raise UsageError(
            f"--host {config.host} lets other machines in, which needs an API key; "
            "give --api-key-file, or bind 127.0.0.1"
        )


class AuthMiddleware:
    """Answers 401 or 403 itself; the rest it passes on."""

    def __init__(
        self,
        app: ASGIApp,
        config: FrontConfig,
        admin_paths: frozenset[str],
        on_refused: Callable[[Scope, ApiError], None],
    ) -> None:
        self._app = app
        self._config = config
        self._admin_paths = admin_paths
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._problem(scope)) is not None:
            self._on_refused(scope, error)
            await send_error(send, error)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        path: str = scope["path"]
        headers = dict(scope["headers"])
        if path in self._admin_paths:
            return self._admin_problem(headers)
        if path in OPEN_PATHS or self._config.api_key is None:
            return None
        if not _has_key(headers, self._config.api_key):
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        return None

    def _admin_problem(self, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._config.admin_key is None:
            return ApiError(403, "administrative routes are off; --admin-key-file turns them on", code="forbidden")
        if not _has_key(headers, self._config.admin_key):
            return ApiError(401, "the administrator's key is missing or wrong", code="invalid_api_key")
        host = headers.get(b"host", b"").decode("latin-1")
        if is_loopback(self._config.host) and not is_loopback(_host_of("//" + host)):
            return ApiError(403, "the Host header names another machine", code="forbidden")
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin.decode("latin-1")).netloc != host:
            return ApiError(403, "administrative routes do not answer pages of other sites", code="forbidden")
        return None


def _has_key(headers: dict[bytes, bytes], key: str) -> bool:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    # compared in constant time, whatever was given
    return hmac.compare_digest(given.strip(), key.encode()) and scheme.lower() == b"bearer"


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
