"""Appends lines to `spans/`, one file at a time: ``<replica>.<incarnation>.<seq>.jsonl``. Knows no span's meaning."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan

from inferdbg.tracing.losses import Losses
from inferdbg.tracing.otlp_json import LineEncoder
from inferdbg.tracing.run_files import SPANS, SPANS_SUFFIX, SegmentName
from inferdbg.tracing.segments import SegmentFile

__all__ = ["SpanFile"]

_RETRY_SECONDS = 1.0

_log = logging.getLogger(__name__)


class SpanFile:
    """The run's span log. What the disk does not take is counted as lost. Used from one thread."""

    def __init__(self, run_dir: Path, replica: str, encoder: LineEncoder, losses: Losses) -> None:
        self._directory = run_dir / SPANS
        self._replica = replica
        self._encoder = encoder
        self._losses = losses
        self._incarnation = 0
        self._seq = 0
        self._file: SegmentFile | None = None
        self._retry_at = 0.0

    def write(self, spans: Sequence[ReadableSpan]) -> None:
        if not spans:
            return
        self._drop_gone_file()
        if time.monotonic() < self._retry_at:
            self._losses.add("spans", len(spans))
            return
        try:
            file = self._file or self._open()
            file.append(self._encoder.line(spans), len(spans))
        except OSError as error:
            if not self._retry_at:
                _log.warning("cannot write to %s: %s; losses are counted", self._directory, error.strerror)
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._losses.add("spans", len(spans))
            return
        self._retry_at = 0.0
        if file.is_full:
            self.close()

    def set_incarnation(self, incarnation: int) -> None:
        if incarnation != self._incarnation:
            self.close()
            self._incarnation, self._seq = incarnation, 0

    def close(self) -> None:
        self._drop_gone_file()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drop_gone_file(self) -> None:
        """Counts the spans that went with a file that somebody deleted or moved away."""
        if self._file is not None and self._file.close_if_gone():
            self._losses.add("spans", self._file.num_items)
            self._file = None

    def _open(self) -> SegmentFile:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        while self._file is None:
            path = self._directory / f"{SegmentName(self._replica, self._incarnation, self._seq)}{SPANS_SUFFIX}"
            if not path.exists():
                self._file = SegmentFile(path)
            self._seq += 1
        return self._file
