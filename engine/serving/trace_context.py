"""W3C trace context out of HTTP headers, as https://www.w3.org/TR/trace-context/ says. Knows no tracing library."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from inferdbg.engine.serving.events import TraceContext

__all__ = ["trace_context_from_headers"]

MAX_TRACESTATE_CHARS = 512
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def trace_context_from_headers(headers: Sequence[tuple[bytes, bytes]]) -> TraceContext:
    """The incoming context with a span of our own below it; a fresh trace where none or a malformed one came in."""
    parents = [value for name, value in headers if name == b"traceparent"]
    match = _TRACEPARENT.fullmatch(parents[0].decode("latin-1").strip(" \t")) if len(parents) == 1 else None
    if match is None or not _is_valid(match):
        return TraceContext(trace_id=_draw(16), span_id=_draw(8))
    state = ",".join(value.decode("latin-1").strip() for name, value in headers if name == b"tracestate")
    return TraceContext(
        trace_id=match[2],
        span_id=_draw(8),
        parent_span_id=match[3],
        sampled=bool(int(match[4], 16) & 1),
        tracestate=state if state and len(state) <= MAX_TRACESTATE_CHARS and state.isascii() else None,
    )


def _is_valid(match: re.Match[str]) -> bool:
    version, trace_id, span_id, _, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return False
    return trace_id.strip("0") != "" and span_id.strip("0") != ""


def _draw(num_bytes: int) -> str:
    """A random id; all zeros means "none" and is never drawn."""
    while True:
        value = secrets.token_hex(num_bytes)
        if value.strip("0"):
            return value
