"""Spans as OTLP/JSON: one `TracesData` object a line, as OpenTelemetry's file exporter specifies. Knows no file.

Against protobuf's own JSON mapping, OTLP writes ids in hex and enums as integers; 64-bit integers are strings in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode

__all__ = ["LineEncoder"]

_KINDS = {
    SpanKind.INTERNAL: 1, SpanKind.SERVER: 2, SpanKind.CLIENT: 3, SpanKind.PRODUCER: 4, SpanKind.CONSUMER: 5
}  # fmt: skip
_STATUS = {StatusCode.UNSET: 0, StatusCode.OK: 1, StatusCode.ERROR: 2}
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode


class LineEncoder:
    """Encodes spans of one resource and one scope."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        described = _encode({"attributes": _attributes(resource.attributes)})
        named = _encode({"name": scope.name, "version": scope.version or ""})
        self._head = f'{{"resourceSpans":[{{"resource":{described},"scopeSpans":[{{"scope":{named},"spans":['
        self._tail = f'],"schemaUrl":{_encode(scope.schema_url or "")}}}]}}]}}\n'

    def line(self, spans: Sequence[ReadableSpan]) -> bytes:
        """One line with all the spans, newline included."""
        return (self._head + ",".join(_encode(_span(span)) for span in spans) + self._tail).encode("ascii")


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.context
    assert context is not None
    document: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "flags": _flags(span.parent),
    }
    if context.trace_state:
        document["traceState"] = context.trace_state.to_header()
    if span.parent is not None:
        document["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.attributes:
        document["attributes"] = _attributes(span.attributes)
    if span.events:
        document["events"] = [
            {"timeUnixNano": str(e.timestamp), "name": e.name, "attributes": _attributes(e.attributes or {})}
            for e in span.events
        ]
    if span.links:
        document["links"] = [_link(link) for link in span.links]
    if span.status.status_code is not StatusCode.UNSET:
        document["status"] = {"code": _STATUS[span.status.status_code]}
        if span.status.description:
            document["status"]["message"] = span.status.description
    return document


def _link(link: Link) -> dict[str, Any]:
    return {
        "traceId": f"{link.context.trace_id:032x}",
        "spanId": f"{link.context.span_id:016x}",
        "attributes": _attributes(link.attributes or {}),
        "flags": _flags(link.context),
    }


def _flags(context: SpanContext | None) -> int:
    """As the OTLP encoder writes them: sampled bits, and whether the parent (or the link's target) is remote."""
    if context is None:
        return _HAS_IS_REMOTE
    return _HAS_IS_REMOTE | (_IS_REMOTE if context.is_remote else 0)


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"arrayValue": {"values": [_value(item) for item in value]}}
