"""Sends spans to a collector from a thread of its own, over a bounded queue. Knows no span's meaning.

A collector that is slow, dead or absent costs the engine nothing: what does not fit the queue, and what the exporter
gives up on, is counted. The exporters are OpenTelemetry's own and obey their OTEL_* variables.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from inferdbg.tracing.losses import Losses
from inferdbg.tracing.otlp_endpoint import TRACES_PATH, OtlpProtocol, check_endpoint, has_path

__all__ = ["SpanShipper", "make_exporter"]

_BATCH = 512


def make_exporter(endpoint: str, protocol: OtlpProtocol) -> SpanExporter:
    """The standard exporter for an endpoint such as ``http://localhost:4317`` (gRPC) or ``http://localhost:4318``.

    For HTTP the path ``/v1/traces`` is added where the endpoint has none, as OTEL_EXPORTER_OTLP_ENDPOINT is read.

    Raises:
        UsageError: the endpoint is no http or https URL.
    """
    check_endpoint(endpoint, "the OTLP endpoint")
    # Half a second of import each, and only one is needed: not at the top.
    if protocol is OtlpProtocol.GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=urlsplit(endpoint).scheme == "http")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint if has_path(endpoint) else endpoint.rstrip("/") + TRACES_PATH)


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
