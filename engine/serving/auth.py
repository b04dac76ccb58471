"""Who may call what: the API's key for the API, the administrator's own for administrative routes.

Each route is wrapped in the rule that guards it, so what a path is spelt like cannot matter.
A browser can be made to send a request to 127.0.0.1, so administrative routes also check Host and Origin.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import URLPath
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from inferdbg.engine.config import FrontConfig
from inferdbg.engine.errors import UsageError
from inferdbg.engine.serving.api_errors import ApiError, send_error

__all__ = ["GuardedRoute", "admin_guard", "api_guard", "check_exposure", "is_loopback"]

Headers = dict[bytes, bytes]
Guard = Callable[[Headers], ApiError | None]
"""From the headers of a request to what is wrong with it."""


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


class GuardedRoute(BaseRoute):
    """A route (a mount, any of them) that answers 401 or 403 to whom `guard` refuses; `on_refused` hears of it."""

    def __init__(
        self, route: BaseRoute, guard: Guard, on_refused: Callable[[Scope, ApiError], None] | None = None
    ) -> None:
        self._route = route
        self._guard = guard
        self._on_refused = on_refused

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # what is not HTTP has no guard that could answer it
        return self._route.matches(scope) if scope["type"] == "http" else (Match.NONE, {})

    def url_path_for(self, name: str, /, **path_params: object) -> URLPath:
        return self._route.url_path_for(name, **path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (error := self._guard(dict(scope["headers"]))) is None:
            await self._route.handle(scope, receive, send)
            return
        if self._on_refused is not None:
            self._on_refused(scope, error)
        await send_error(send, error)


def api_guard(config: FrontConfig) -> Guard:
    """Asks for the API's key, if there is one."""

    def check(headers: Headers) -> ApiError | None:
        if config.api_key is None or _has_key(headers, config.api_key):
            return None
        return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    return check


def admin_guard(config: FrontConfig) -> Guard:
    """Asks for the administrator's key, without which nobody comes in, and for a Host and an Origin that are ours."""

    def check(headers: Headers) -> ApiError | None:
        if config.admin_key is None:
            return ApiError(403, "administrative routes are off; --admin-key-file turns them on", code="forbidden")
        if not _has_key(headers, config.admin_key):
            return ApiError(401, "the administrator's key is missing or wrong", code="invalid_api_key")
        host = headers.get(b"host", b"").decode("latin-1")
        if is_loopback(config.host) and not is_loopback(_host_of("//" + host)):
            return ApiError(403, "the Host header names another machine", code="forbidden")
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin.decode("latin-1")).netloc != host:
            return ApiError(403, "administrative routes do not answer pages of other sites", code="forbidden")
        return None

    return check


def _has_key(headers: Headers, key: str) -> bool:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    # compared in constant time, whatever was given
    return hmac.compare_digest(given.strip(), key.encode()) and scheme.lower() == b"bearer"


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
