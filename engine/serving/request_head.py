"""What the headers of a request say about it: ids, trace context, class of service, tenant."""

from __future__ import annotations

import uuid

from starlette.types import Scope

from inferdbg.engine.serving.request_state import RequestHead
from inferdbg.engine.serving.trace_context import trace_context_from_headers

__all__ = ["head_of"]

MAX_VALUE_CHARS = 256

CLIENT_REQUEST_ID = b"x-request-id"
REPLAY_OF = b"x-inferdbg-replay-of"
SERVICE_CLASS = b"x-inferdbg-class"
TENANT = b"x-inferdbg-tenant"


def head_of(scope: Scope, id_prefix: str, received_ns: int) -> RequestHead:
    """The head of a request, with an id of our own. Values are cut at 256 characters; the last of a name counts."""
    headers: list[tuple[bytes, bytes]] = list(scope["headers"])
    by_name = dict(headers)

    def value(name: bytes) -> str | None:
        return by_name[name].decode("utf-8", "replace")[:MAX_VALUE_CHARS] or None if name in by_name else None

    return RequestHead(
        request_id=f"{id_prefix}{uuid.uuid4().hex}",
        received_ns=received_ns,
        endpoint=scope["path"],
        trace=trace_context_from_headers(headers),
        client_request_id=value(CLIENT_REQUEST_ID),
        replay_of=value(REPLAY_OF),
        service_class=value(SERVICE_CLASS),
        tenant=value(TENANT),
    )
