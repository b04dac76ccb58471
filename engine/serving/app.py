"""The ASGI application of a front: its routes, authentication, and the shape of every error."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from inferdbg.engine.serving.api_errors import ApiError
from inferdbg.engine.serving.auth import GuardedRoute, admin_guard, api_guard
from inferdbg.engine.serving.chat import ChatEndpoint
from inferdbg.engine.serving.completions import CompletionEndpoint
from inferdbg.engine.serving.front import Front
from inferdbg.engine.serving.generate import GenerationApp
from inferdbg.engine.serving.utility_routes import MetricsRenderer, api_routes, error_response, open_routes

__all__ = ["build_app"]

_CODES = {404: "not_found", 405: "method_not_allowed"}


def build_app(
    front: Front, *, metrics: MetricsRenderer | None = None, extra_routes: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """The application. `extra_routes` are administrative: see `auth.py` for who may call them."""
    api, admin = api_guard(front.config), admin_guard(front.config)
    routes: list[BaseRoute] = list(open_routes(front, metrics))
    for endpoint in (ChatEndpoint(), CompletionEndpoint()):
        app = GenerationApp(front, endpoint)
        routes.append(GuardedRoute(Route(endpoint.path, app, methods=["POST"]), api, app.note_refused))
    routes += [GuardedRoute(route, api) for route in api_routes(front)]
    routes += [GuardedRoute(route, admin) for route in extra_routes]
    return Starlette(routes=routes, exception_handlers={HTTPException: _on_http_error, Exception: _on_error})


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = error_response(ApiError(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))
