from __future__ import annotations

import socket
import threading
import time

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from tracing_factories import Script, arrived, closed, step
from tracing_otlp_receivers import GrpcReceiver, HttpReceiver

from inferdbg.engine.errors import UsageError
from inferdbg.engine.serving.events import EndKind
from inferdbg.tracing.losses import Losses
from inferdbg.tracing.otlp_endpoint import OtlpProtocol
from inferdbg.tracing.otlp_export import SpanShipper, make_exporter
from inferdbg.tracing.sampling import parse_sample_rule


@pytest.fixture(params=[GrpcReceiver, HttpReceiver], ids=["grpc", "http"])
def receiver(request):
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def environ(receiver):
    return {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if isinstance(receiver, GrpcReceiver) else "http/protobuf"}


def received(receiver):
    spans = []
    while not receiver.requests.empty():
        for resource in receiver.requests.get().resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    return spans


def test_a_collector_gets_the_same_trees_as_the_run(start, receiver, environ):
    recording = start(otlp_endpoint=receiver.endpoint, environ=environ)
    for event in Script(num_requests=3).run():
        recording.observer(event)
    recording.close()
    spans = received(receiver)
    roots = [span for span in spans if not span.parent_span_id]
    assert [root.name for root in roots] == ["chat tiny"] * 3
    assert len(spans) == 27
    assert {root.trace_id.hex() for root in roots} == {arrived(f"req-{i:04d}").trace.trace_id for i in range(3)}
    assert recording.dropped()["otlp_spans"] == 0
    if isinstance(receiver, HttpReceiver):
        assert receiver.paths == ["/v1/traces"]


def test_tail_sampling_decides_when_the_request_has_ended(start, receiver, environ):
    rule = parse_sample_rule("errors,0%")
    recording = start(otlp_endpoint=receiver.endpoint, environ=environ, otlp_sample=rule)
    good, bad = arrived("good", seq_ids=(0,)), arrived("bad", seq_ids=(1,))
    for event in (good, bad, closed(good), closed(bad, end=EndKind.FAILED, error_type="engine_lost")):
        recording.observer(event)
    recording.close()
    spans = received(receiver)
    assert {span.trace_id.hex() for span in spans} == {bad.trace.trace_id}
    in_run = "".join(path.read_text() for path in (recording.run_dir / "spans").iterdir())
    assert good.trace.trace_id in in_run


def test_spans_go_to_a_collector_without_a_run(start, receiver, environ):
    recording = start(run_dir=None, otlp_endpoint=receiver.endpoint, environ=environ, trace_steps=True)
    recording.observer(arrived())
    recording.observer(step(1))
    recording.observer(closed())
    recording.close()
    assert {"step", "chat tiny"} <= {span.name for span in received(receiver)}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_dead_collector_slows_nothing_and_its_losses_are_counted(start, protocol):
    with socket.socket() as placeholder:  # bound and not listening: nobody answers, nobody else can
        placeholder.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{placeholder.getsockname()[1]}"
        recording = start(otlp_endpoint=endpoint, environ={"OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
        script = Script(num_requests=20).run()
        began = time.perf_counter()
        for event in script:
            recording.observer(event)
        assert time.perf_counter() - began < 0.5
        assert recording.flush(2)
        began = time.perf_counter()
        recording.close()
        assert time.perf_counter() - began < 8
    assert recording.dropped()["otlp_spans"] == 20 * 9
    assert recording.dropped()["spans"] == 0


class Stuck(SpanExporter):
    """A collector that accepts a connection and never answers."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def export(self, spans):
        self.entered.set()
        self.release.wait(10)
        return SpanExportResult.FAILURE


def test_the_queue_is_bounded_and_whole_trees_are_dropped():
    exporter, losses = Stuck(), Losses()
    shipper = SpanShipper(exporter, losses, max_queued=10, period_seconds=0.001)
    shipper.send([object()])
    assert exporter.entered.wait(5)
    shipper.send([object()] * 8)
    shipper.send([object()] * 3)  # would not fit as a whole
    shipper.send([object()] * 2)
    assert losses.counts()["otlp_spans"] == 3
    shipper.close(timeout_seconds=0.05)
    assert losses.counts()["otlp_spans"] == 3 + 10 + 1
    exporter.release.set()


def test_what_is_no_url_cannot_be_exported_to():
    for endpoint in ("localhost:4317", "ftp://x", "http://"):
        with pytest.raises(UsageError, match="http:// or https://"):
            make_exporter(endpoint, OtlpProtocol.GRPC)


def test_headers_from_the_environment_reach_the_collector(monkeypatch, start):
    receiver = HttpReceiver()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        recording = start(otlp_endpoint=receiver.endpoint, environ={"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
        recording.observer(arrived())
        recording.observer(closed())
        recording.close()
        assert len(received(receiver)) == 9
    finally:
        receiver.close()
