"""Builds the writing side of a recording: tables, spans, exporter, manifest. Apart from `session`, so that a server
without a recording imports neither pyarrow nor the OpenTelemetry SDK."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.housekeeping import Housekeeper
from inferdbg.tracing.losses import Losses
from inferdbg.tracing.manifest import Manifest, describe_config
from inferdbg.tracing.otlp_endpoint import choose_protocol
from inferdbg.tracing.otlp_export import SpanShipper, make_exporter
from inferdbg.tracing.otlp_json import LineEncoder
from inferdbg.tracing.recorder import Recorder, Tables
from inferdbg.tracing.recording_config import RecordingConfig
from inferdbg.tracing.rows import RowContext
from inferdbg.tracing.run_files import make_private
from inferdbg.tracing.span_file import SpanFile
from inferdbg.tracing.span_router import SpanRouter
from inferdbg.tracing.spans import ServerAddress, SpanBuilder, make_resource, make_scope
from inferdbg.tracing.step_window import StepWindow
from inferdbg.tracing.token_log import HashedIds, TokenLog, make_token_log
from inferdbg.tracing.tokenizer_print import copy_tokenizer, fingerprint_tokenizer

if TYPE_CHECKING:
    from inferdbg.engine.serving.events import CoreStarted, EngineLost

__all__ = ["Writing", "build_writing"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Writing:
    """The parts of a recording that end with it, in the order in which they must."""

    run_dir: Path | None
    close_tables: Callable[[], None]
    close_shipper: Callable[[], None]
    close_housekeeper: Callable[[], None]
    end_manifest: Callable[[str, Mapping[str, int], Mapping[str, float]], None]
    cpu_seconds: Callable[[], dict[str, float]]

    def close(self, reason: str, losses: Losses, seconds: Callable[[], Mapping[str, float]]) -> None:
        self.close_tables()
        self.close_shipper()
        self.close_housekeeper()
        try:
            self.end_manifest(reason, losses.counts(), seconds())
        except OSError as error:
            _log.warning("the end of the run could not be written to its manifest: %s", error.strerror)


def build_writing(
    config: RecordingConfig, window: StepWindow, losses: Losses, version: str
) -> tuple[Recorder, Writing]:
    """The recorder for the bus, and what has to be closed at the end. Raises UsageError."""
    tokens = make_token_log(config.token_log, config.token_log_key)
    shipper = None
    if config.otlp_endpoint is not None:
        protocol = choose_protocol(config.otlp_endpoint, config.environ)
        shipper = SpanShipper(make_exporter(config.otlp_endpoint, protocol), losses)
    resource = make_resource(version, config.replica, config.run_dir.name if config.run_dir is not None else None)
    scope = make_scope(version)
    run_dir, tables, span_file, housekeeper, manifest = config.run_dir, None, None, None, None
    if run_dir is not None:
        _make_run_dir(run_dir)
        manifest = _manifest(config, run_dir, tokens)
        housekeeper = Housekeeper(run_dir, config.replica, manifest, config.retention, losses)
        housekeeper.start()
        tables = Tables(run_dir, config.replica, losses, housekeeper.seal)
        span_file = SpanFile(run_dir, config.replica, LineEncoder(resource, scope), losses)
    address = ServerAddress(config.front.host, config.front.port) if config.front is not None else None
    spans = SpanRouter(
        SpanBuilder(config.clock, resource, scope, config.replica, address),
        window,
        config.otlp_sample,
        always_steps=config.trace_steps,
        file=span_file,
        ship=shipper.send if shipper is not None else None,
    )
    context = RowContext(config.replica, 0, config.model_fingerprint, tokens, config.log_text)
    on_core: Callable[[CoreStarted | EngineLost], None] = housekeeper.core if housekeeper is not None else _ignore
    recorder = Recorder(context, tables=tables, spans=spans, on_core=on_core, losses=losses)

    def close_tables() -> None:
        if tables is not None and span_file is not None:
            tables.close()
            span_file.close()

    def end_manifest(reason: str, dropped: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        if manifest is not None:
            manifest.end(reason, ClockPair.now(), dropped, seconds)

    def cpu_seconds() -> dict[str, float]:
        seconds = {"seal": housekeeper.cpu_seconds} if housekeeper is not None else {}
        return seconds | ({"export": shipper.cpu_seconds} if shipper is not None else {})

    return recorder, Writing(
        run_dir=run_dir,
        close_tables=close_tables,
        close_shipper=shipper.close if shipper is not None else _ignore,
        close_housekeeper=housekeeper.close if housekeeper is not None else _ignore,
        end_manifest=end_manifest,
        cpu_seconds=cpu_seconds,
    )


def _make_run_dir(run_dir: Path) -> None:
    try:
        make_private(run_dir)
    except OSError as error:
        _log.warning("cannot write to %s: %s; serving goes on, losses are counted", run_dir, error.strerror)


def _manifest(config: RecordingConfig, run_dir: Path, tokens: TokenLog) -> Manifest:
    model_dir = config.core.model_dir if config.core is not None else None
    tokenizer = None
    if model_dir is not None:
        tokenizer = fingerprint_tokenizer(model_dir)
        try:
            tokenizer["path"] = copy_tokenizer(model_dir, run_dir, tokenizer["hash"])
        except OSError:
            tokenizer["path"] = None
    logged: dict[str, Any] = {
        "token_log": config.token_log.value,
        "text": config.log_text,
        "retain": str(config.retention),
        "replica": config.replica,
        "slo_ttft_seconds": config.slo_ttft_seconds,
    }
    if isinstance(tokens, HashedIds):
        logged["token_log_key_id"] = tokens.key_id
    manifest = Manifest(
        run_dir,
        kind=config.kind,
        clock=config.clock,
        command=config.command,
        environ=config.environ,
        config=describe_config(config.core, config.front),
        logged=logged,
        model={
            "name": config.front.model_name if config.front is not None else None,
            "fingerprint": config.model_fingerprint,
        },
        tokenizer=tokenizer,
        otlp_endpoint=config.otlp_endpoint,
    )
    try:
        manifest.write()
    except OSError as error:
        _log.warning("cannot write the manifest of %s: %s; it is tried again", run_dir, error.strerror)
    return manifest


def _ignore(*_: Any) -> None:
    """Nothing to do."""
