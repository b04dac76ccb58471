"""Where spans are sent and how: from a flag and OpenTelemetry's variables. Knows no exporter and imports none."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from urllib.parse import urlsplit

from inferdbg.engine.errors import UsageError

__all__ = ["TRACES_PATH", "OtlpProtocol", "check_endpoint", "choose_endpoint", "choose_protocol", "has_path"]

TRACES_PATH = "/v1/traces"
_TRACES_ENDPOINT, _ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


class OtlpProtocol(StrEnum):
    """The spellings of OTEL_EXPORTER_OTLP_PROTOCOL."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


def choose_endpoint(flag: str | None, environ: Mapping[str, str], *, makes_spans: bool) -> str | None:
    """The collector's endpoint: the flag's, else the standard variables', where spans are made anyway.

    OTEL_EXPORTER_OTLP_ENDPOINT is a base that HTTP's path is added to; the one for traces is taken as it is.
    OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none turn the variables off, not the flag.

    Raises:
        UsageError: a variable holds no URL, or names a protocol there is no exporter for.
    """
    if flag is not None or not makes_spans:
        return flag
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return None
    if endpoint := environ.get(_TRACES_ENDPOINT, "").strip():
        return check_endpoint(endpoint, _TRACES_ENDPOINT)
    if endpoint := environ.get(_ENDPOINT, "").strip():
        check_endpoint(endpoint, _ENDPOINT)
        is_base = has_path(endpoint) and choose_protocol(endpoint, environ) is OtlpProtocol.HTTP
        return endpoint.rstrip("/") + TRACES_PATH if is_base else endpoint
    return None


def check_endpoint(endpoint: str, source: str) -> str:
    """The endpoint. Raises UsageError where it is no http or https URL; `source` says where it was given."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{source} must be an http:// or https:// URL, {endpoint!r} given")
    return endpoint


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
    is_http = has_path(endpoint) or urlsplit(endpoint).netloc.endswith(":4318")
    return OtlpProtocol.HTTP if is_http else OtlpProtocol.GRPC


def has_path(endpoint: str) -> bool:
    """Whether the URL names more than a host."""
    return urlsplit(endpoint).path.strip("/") != ""
