"""Puts a recording together: the one constructor that the command line uses. Knows every part, does none of their work.

observer ──queue──> record thread ──> metrics, rows (Arrow streams), spans ──queue──> export thread ──> collector
                                          └──complete streams──> seal thread ──> Parquet, retention, manifest
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferdbg.engine.errors import UsageError
from inferdbg.engine.serving.events import Observer
from inferdbg.tracing.bus import Bus, Handler
from inferdbg.tracing.losses import Losses
from inferdbg.tracing.metrics import Metrics
from inferdbg.tracing.recording_config import RecordingConfig
from inferdbg.tracing.run_files import MANIFEST
from inferdbg.tracing.step_window import StepWindow

if TYPE_CHECKING:
    from inferdbg.tracing.writing import Writing

__all__ = ["Recording", "RecordingConfig", "start_recording"]


class Recording:
    """A recording under way. `observer` goes to the front; `close` ends the run."""

    def __init__(
        self, bus: Bus, metrics: Metrics, step_window: StepWindow, losses: Losses, writing: Writing | None
    ) -> None:
        self._bus = bus
        self._writing = writing
        self._losses = losses
        self._scrape_seconds = 0.0
        self._closed = False
        self.metrics = metrics
        self.step_window = step_window

    @property
    def observer(self) -> Observer:
        return self._bus

    @property
    def run_dir(self) -> Path | None:
        return self._writing.run_dir if self._writing is not None else None

    def metrics_response(self, accept: str | None = None) -> tuple[bytes, str]:
        """Body and content type for `/metrics`, in the format that the Accept header asks for."""
        began = time.perf_counter()
        try:
            return self.metrics.response(accept)
        finally:
            self._scrape_seconds += time.perf_counter() - began

    def dropped(self) -> dict[str, int]:
        """What was lost so far, by signal."""
        return self._losses.counts()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds spent in instrumentation so far, by place."""
        seconds = self._bus.cpu_seconds() | {"scrape": self._scrape_seconds}
        return seconds | (self._writing.cpu_seconds() if self._writing is not None else {})

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Waits until everything observed so far can be read from the run. False: timed out. Not for event loops."""
        return self._bus.flush(timeout_seconds)

    def close(self, reason: str = "stopped") -> None:
        """Writes what is queued, seals the segments, ends the manifest. Idempotent; may take seconds."""
        if self._closed:
            return
        self._closed = True
        self._bus.close()
        if self._writing is not None:
            self._writing.close(reason, self._losses, self.cpu_seconds)


def start_recording(
    config: RecordingConfig,
    *,
    loop_lag: Callable[[], float] | None = None,
    observer_errors: Callable[[], int] | None = None,
) -> Recording:
    """Starts the threads and, with a run directory, writes its manifest.

    `loop_lag` in seconds and `observer_errors`, the events whose observer threw, are asked of the front.

    A directory that cannot be written does not stop it: losses are counted, shown and logged, and writing is
    tried again.

    Raises:
        UsageError: the directory holds something already; hashing without a key; an endpoint that is no URL.
    """
    if config.run_dir is not None:
        _check_run_dir(config.run_dir)
    losses = Losses()
    if observer_errors is not None:
        losses.watch("events", observer_errors)
    window = StepWindow()
    recording: list[Recording] = []  # the metrics ask for figures that the recording has only once it exists

    def cpu_seconds() -> Mapping[str, float]:
        return recording[0].cpu_seconds() if recording else {}

    version = metadata.version("inferdbg")
    metrics = Metrics(
        replica=config.replica,
        replica_label=config.replica_label,
        model=config.front.model_name if config.front is not None else "",
        version=version,
        dropped=losses.counts,
        cpu_seconds=cpu_seconds,
        loop_lag=loop_lag,
        slo_ttft_seconds=config.slo_ttft_seconds,
        num_slots=config.core.max_num_seqs if config.core is not None else None,
        wall_ns=config.clock.wall,
    )
    handlers: list[Handler] = [metrics]
    writing: Writing | None = None
    flush: Callable[[], None] = _nothing
    if config.run_dir is not None or config.otlp_endpoint is not None:
        # pyarrow and the OpenTelemetry SDK are imported only by who records
        from inferdbg.tracing.writing import build_writing

        recorder, writing = build_writing(config, window, losses, version)
        handlers.append(recorder)
        flush = recorder.flush
    bus = Bus(handlers, flush, losses)
    recording.append(Recording(bus, metrics, window, losses, writing))
    bus.start()
    return recording[0]


def _check_run_dir(run_dir: Path) -> None:
    """A run has its directory to itself: what else lies there could be read, or deleted, as a part of it."""
    try:
        with os.scandir(run_dir) as entries:
            is_empty = next(entries, None) is None
    except NotADirectoryError:
        if run_dir.exists():
            raise UsageError(f"{run_dir} is a file; --run-dir takes a directory that is new or empty") from None
        return
    except OSError:
        return  # absent, or not readable: serving goes on, and what cannot be written is counted
    if not is_empty:
        what = "already holds a run" if (run_dir / MANIFEST).exists() else "is not empty"
        raise UsageError(
            f"{run_dir} {what}; --run-dir takes a directory that is new or empty, for example {run_dir / 'new-run'}"
        )


def _nothing(*_: Any) -> None:
    """Nothing to flush."""
