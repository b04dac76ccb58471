"""The HTTP connection under an ASGI request: when its first byte came, how it is read, how it is cut.

uvicorn's protocol with additions: the time of a message's first byte is taken when the event loop hands the data
over (before parsing; the loop's own lag is measured elsewhere), headers have a limit in size and in time, and a
malformed message is answered in the shape of the API. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferdbg.engine.serving.api_errors import ApiError

__all__ = ["CONNECTION_KEY", "Connection", "ServingProtocol", "connection_of", "read_body"]

CONNECTION_KEY = "inferdbg.connection"
MAX_HEADER_BYTES = 64 << 10
HEADER_SECONDS = 30.0  # for a connection's first headers, or from a later message's first byte to its last header
DISCARD_FACTOR = 8  # a body up to so many times the limit is read to its end, so that the client sees the answer


@dataclass(frozen=True, slots=True)
class Connection:
    """What an endpoint needs of the connection beyond ASGI."""

    received_ns: int  # first byte of the request, monotonic
    transport: asyncio.Transport | None = None

    def cut(self) -> None:
        """Drops the connection and what it has not sent: for a client that takes nothing."""
        if self.transport is not None:
            self.transport.abort()


def connection_of(scope: Scope) -> Connection:
    """The connection of a request; under another ASGI server, one whose first byte is now."""
    connection = scope.get(CONNECTION_KEY)
    return connection if isinstance(connection, Connection) else Connection(time.monotonic_ns())


class ServingProtocol(HttpToolsProtocol):
    """See the module's docstring."""

    _data_ns = 0
    _in_headers = False
    _header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._data_ns = time.monotonic_ns()
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:  # the parser itself would gather them without end
                self.send_400_response(f"The headers are larger than {MAX_HEADER_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        if self._header_timer is None:
            self._await_headers()
        scope: Any = self.scope
        scope[CONNECTION_KEY] = Connection(self._data_ns, self.transport)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", ApiError(400, msg, code="malformed_http"))

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._on_late_headers)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_late_headers(self) -> None:
        self._header_timer = None
        if not self._in_headers:  # a connection that was opened and never used
            self.transport.close()
            return
        if self.cycle is not None and not self.cycle.response_complete:  # an earlier answer is still on its way
            self._await_headers()
            return
        message = f"the headers did not arrive within {HEADER_SECONDS:g} s"
        self._refuse("408 Request Timeout", ApiError(408, message, code="request_timeout"))

    def _refuse(self, status_line: str, error: ApiError) -> None:
        body = msgspec.json.encode(error.document())
        head = (
            f"HTTP/1.1 {status_line}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_seconds: float) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 if it is larger than `max_bytes`, 408 if it takes too long.
        ClientDisconnected: the client left.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _read_body(scope, receive, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {timeout_seconds:g} s", code="request_timeout", close=True
        ) from None


async def _read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    announced = _content_length(scope)
    if announced is not None and announced > max_bytes * DISCARD_FACTOR:
        raise _too_large(max_bytes, announced)
    body = bytearray()
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= max_bytes:
            body += chunk
        elif size > max_bytes * DISCARD_FACTOR:
            raise _too_large(max_bytes, size)
        if not message.get("more_body", False):
            break
    if size > max_bytes:
        raise _too_large(max_bytes, size)
    return bytes(body)


class ClientDisconnected(Exception):
    """The client left: before its request was read, or while it was being answered."""


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None


def _too_large(max_bytes: int, size: int) -> ApiError:
    return ApiError(
        413, f"the body has {size} bytes or more; the limit is {max_bytes}", code="request_too_large", close=True
    )
