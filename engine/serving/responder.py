"""Sends one request's answer, as a stream of events or whole, and notes when and how much.

A client that takes nothing for too long ends the sending. Knows HTTP; nothing of tokens or of the core.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from typing import TypeVar

import msgspec
from starlette.types import Message, Send

from inferdbg.engine.serving.api_errors import ApiError, send_error, send_json
from inferdbg.engine.serving.connection import ClientDisconnected
from inferdbg.engine.serving.request_state import RequestState

__all__ = ["Responder", "SlowClient"]

Result = TypeVar("Result")

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class SlowClient(Exception):
    """The client took no bytes for too long."""


class Responder:
    """One answer. `status` is the HTTP status once it was sent.

    A body counts as sent when the transport has taken it; while the transport's buffer is full, sending waits.
    """

    def __init__(self, send: Send, request: RequestState, slow_client_seconds: float) -> None:
        self._send = send
        self._request = request
        self._patience = slow_client_seconds
        self._headers = [(b"x-request-id", request.head.request_id.encode("ascii"))]
        self.status: int | None = None

    async def send_events(self, documents: Iterable[object], *, last: bool = False) -> None:
        """Sends server-sent events, the status line before the first; `last` adds the end of the stream.

        Raises:
            SlowClient: the client takes nothing.
            ClientDisconnected: it left.
        """
        body = b"".join(b"data: " + msgspec.json.encode(document) + b"\n\n" for document in documents)
        body += _DONE if last else b""
        if not body:
            return
        begun = time.monotonic_ns()
        if self.status is None:
            self.status = 200
            head: Message = {"type": "http.response.start", "status": 200, "headers": [*_EVENT_HEADERS, *self._headers]}
            await self._within_patience(self._send(head))
        await self._within_patience(self._send({"type": "http.response.body", "body": body, "more_body": not last}))
        self._note(len(body), begun)
        if self._request.is_disconnected:
            raise ClientDisconnected

    async def send_document(self, document: object) -> None:
        """Sends a whole answer. Raises like `send_events`."""
        begun = time.monotonic_ns()
        self.status = 200
        self._note(await self._within_patience(send_json(self._send, 200, document, self._headers)), begun)

    async def send_error(self, error: ApiError) -> None:
        """Answers with an error, or ends the stream that has begun with one. Raises like `send_events`."""
        if self.status is not None:
            await self.send_events([error.document()], last=True)
            return
        begun = time.monotonic_ns()
        self.status = error.status
        self._note(await self._within_patience(send_error(self._send, error, self._headers)), begun)

    def _note(self, num_bytes: int, begun_ns: int) -> None:
        request, now = self._request, time.monotonic_ns()
        request.bytes_out += num_bytes
        request.send_ns += now - begun_ns
        if request.first_byte_ns is None:
            request.first_byte_ns = now

    async def _within_patience(self, sending: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(self._patience):
                return await sending
        except TimeoutError:
            raise SlowClient from None
