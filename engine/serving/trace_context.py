"""W3C trace context out of HTTP headers, as https://www.w3.org/TR/trace-context/ says. Knows no tracing library."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from inferdbg.engine.serving.events import TraceContext

__all__ = ["trace_context_from_headers"]

MAX_TRACESTATE_CHARS = 512
MAX_TRACESTATE_MEMBERS = 32
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_KEY = r"(?:[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = re.compile(f"({_KEY})={_VALUE}")


def trace_context_from_headers(headers: Sequence[tuple[bytes, bytes]]) -> TraceContext:
    """The incoming context with a span of our own below it; a fresh trace where none or a malformed one came in."""
    parents = [value for name, value in headers if name == b"traceparent"]
    match = _TRACEPARENT.fullmatch(parents[0].decode("latin-1").strip(" \t")) if len(parents) == 1 else None
    if match is None or not _is_valid(match):
        return TraceContext(trace_id=_draw(16), span_id=_draw(8))
    return TraceContext(
        trace_id=match[2],
        span_id=_draw(8),
        parent_span_id=match[3],
        sampled=bool(int(match[4], 16) & 1),
        tracestate=_tracestate([value.decode("latin-1") for name, value in headers if name == b"tracestate"]),
    )


def _tracestate(values: Sequence[str]) -> str | None:
    """The members in order; None where there is none, one is malformed or a repetition, or they are too many.

    The standard has a malformed state dropped as a whole. What tracing libraries do with one is to log its text.
    """
    members = [stripped for value in values for member in value.split(",") if (stripped := member.strip(" \t"))]
    keys = [match[1] for member in members if (match := _MEMBER.fullmatch(member))]
    state = ",".join(members)
    is_sound = len(keys) == len(members) == len(set(keys)) and len(members) <= MAX_TRACESTATE_MEMBERS
    return state if state and is_sound and len(state) <= MAX_TRACESTATE_CHARS else None


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
