"""Sends spans to a collector from a thread of its own, over a bounded queue. Knows no span's meaning.

A collector that is slow, dead or absent costs the engine nothing: what does not fit the queue, and what the exporter
gives up on, is counted. The exporters are OpenTelemetry's own and obey their OTEL_* variables.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from inferdbg.engine.errors import UsageError
from inferdbg.tracing.losses import Losses

__all__ = ["OtlpProtocol", "SpanShipper", "choose_protocol", "make_exporter"]

_BATCH = 512


class OtlpProtocol(StrEnum):
    """The spellings of OTEL_EXPORTER_OTLP_PROTOCOL."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


def choose_protocol(endpoint: str, environ: Mapping[str, str]) -> OtlpProtocol:
    """What the endpoint speaks: as OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL say; without
    them HTTP where the endpoint has port 4318 or a path, else gRPC.

    Raises:
        UsageError: the variable names a protocol there is no exporter for.
    """
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if asked := environ.get(name, "").strip():
            try:
                return OtlpProtocol(asked)
            except ValueError:
                raise UsageError(f"{name} must be grpc or http/protobuf, {asked!r} given") from None
    parts = urlsplit(endpoint)
    has_path = parts.path.strip("/") != ""
    return OtlpProtocol.HTTP if has_path or parts.netloc.endswith(":4318") else OtlpProtocol.GRPC


def make_exporter(endpoint: str, protocol: OtlpProtocol) -> SpanExporter:
    """The standard exporter for an endpoint such as ``http://localhost:4317`` (gRPC) or ``http://localhost:4318``.

    For HTTP the path ``/v1/traces`` is added where the endpoint has none, as OTEL_EXPORTER_OTLP_ENDPOINT is read.

    Raises:
        UsageError: the endpoint is no http or https URL.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"the OTLP endpoint must be an http:// or https:// URL, {endpoint!r} given")
    # Half a second of import each, and only one is needed: not at the top.
    if protocol is OtlpProtocol.GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=parts.scheme == "http")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    has_path = parts.path.strip("/") != ""
    return HttpExporter(endpoint=endpoint if has_path else endpoint.rstrip("/") + "/v1/traces")


class SpanShipper:
    """The bounded queue in front of an exporter, and the thread that empties it."""

    def __init__(
        self, exporter: SpanExporter, losses: Losses, *, max_queued: int = 8192, period_seconds: float = 1.0
    ) -> None:
        self._exporter = exporter
        self._losses = losses
        self._max_queued = max_queued
        self._period = period_seconds
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._in_hand = 0
        self._abandoned = False  # what is still in hand has been counted as lost
        self._cpu_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="inferdbg-export", daemon=True)
        # The exporters log every retry; losses are counted and shown instead.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._thread.start()

    @property
    def cpu_seconds(self) -> float:
        return self._cpu_seconds

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Queues the spans, all or none: half a trace helps nobody. Never blocks."""
        if len(self._queue) + len(spans) > self._max_queued:
            self._losses.add("otlp_spans", len(spans))
            return
        self._queue.extend(spans)
        if len(self._queue) >= _BATCH:
            self._wake.set()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Sends what is queued, for at most the time-out; counts the rest as lost."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._abandoned = True
            self._losses.add("otlp_spans", len(self._queue) + self._in_hand)
            self._queue.clear()
        self._exporter.shutdown()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._period)
            self._wake.clear()
            closing = self._closing.is_set()
            while self._queue:
                self._export([self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))])
                self._cpu_seconds = time.thread_time()
            if closing:
                return

    def _export(self, batch: list[ReadableSpan]) -> None:
        self._in_hand = len(batch)
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # an exporter of another library must not end this thread
            taken = False
        self._in_hand = 0
        if not taken and not self._abandoned:
            self._losses.add("otlp_spans", len(batch))
