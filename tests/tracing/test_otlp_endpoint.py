from __future__ import annotations

import pytest

from inferdbg.engine.errors import UsageError
from inferdbg.tracing.otlp_endpoint import OtlpProtocol, choose_endpoint, choose_protocol

BASE, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("flag", "environ", "wanted"),
    [
        (None, {}, None),
        (None, {BASE: " "}, None),
        (None, {BASE: "http://c:4317"}, "http://c:4317"),
        (None, {BASE: "http://c:4318/"}, "http://c:4318/"),
        (None, {BASE: "http://c/otlp/"}, "http://c/otlp/v1/traces"),
        (None, {BASE: "http://c/otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://c/otlp"),
        (None, {BASE: "http://c:4317", TRACES: "http://t/in"}, "http://t/in"),
        ("http://flag:1", {BASE: "http://c:4317", TRACES: "http://t/in"}, "http://flag:1"),
        (None, {BASE: "http://c:4317", "OTEL_SDK_DISABLED": "true"}, None),
        (None, {TRACES: "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://flag:1", {"OTEL_TRACES_EXPORTER": "none"}, "http://flag:1"),
    ],
)
def test_the_standard_variables_stand_in_for_the_flag(flag, environ, wanted):
    assert choose_endpoint(flag, environ, makes_spans=True) == wanted


def test_the_variables_do_not_turn_recording_on():
    assert choose_endpoint(None, {BASE: "http://c:4317"}, makes_spans=False) is None
    assert choose_endpoint("http://flag:1", {}, makes_spans=False) == "http://flag:1"


@pytest.mark.parametrize("name", [BASE, TRACES])
def test_a_variable_that_is_no_url_is_named(name):
    with pytest.raises(UsageError, match=f"{name} must be an http:// or https:// URL, 'c:4317' given"):
        choose_endpoint(None, {name: "c:4317"}, makes_spans=True)


@pytest.mark.parametrize(
    ("endpoint", "environ", "protocol"),
    [
        ("http://localhost:4317", {}, OtlpProtocol.GRPC),
        ("http://localhost:4318", {}, OtlpProtocol.HTTP),
        ("https://host/v1/traces", {}, OtlpProtocol.HTTP),
        ("http://localhost:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, OtlpProtocol.GRPC),
        ("http://h:1", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, OtlpProtocol.HTTP),
    ],
)
def test_the_protocol_follows_the_environment_then_the_endpoint(endpoint, environ, protocol):
    assert choose_protocol(endpoint, environ) is protocol


def test_a_protocol_without_an_exporter_is_refused():
    with pytest.raises(UsageError, match="grpc or http/protobuf"):
        choose_protocol("http://h", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
