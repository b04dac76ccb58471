"""The slow work of a recording, in a thread of its own: sealing, retention, and keeping the small JSON files true.

Nothing here may delay a flush: a 32 MB segment takes a second to seal.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inferdbg.engine.serving.events import CoreStarted, EngineLost
from inferdbg.tracing.deletions import Deletions
from inferdbg.tracing.losses import Losses
from inferdbg.tracing.manifest import Manifest, ReplicaFile
from inferdbg.tracing.retention import Retention, Segment, apply_retention
from inferdbg.tracing.seal import seal_stream

__all__ = ["Housekeeper"]

_PERIOD_SECONDS = 1.0
_RETENTION_SECONDS = 30.0
_TOUCH_SECONDS = 15.0

_log = logging.getLogger(__name__)


class Housekeeper:
    """Seals streams given to `seal`; writes the manifest again until the disk takes it."""

    def __init__(self, run_dir: Path, replica: str, manifest: Manifest, retention: Retention, losses: Losses) -> None:
        self._run_dir = run_dir
        self._replica = replica
        self._manifest = manifest
        self._retention = retention
        self._losses = losses
        self._streams: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._unsealed: list[Path] = []
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._cores: queue.SimpleQueue[CoreStarted | EngineLost] = queue.SimpleQueue()
        self._file: ReplicaFile | None = None  # there is none before there is a core, or a loss to tell of
        self._deleted = Deletions()
        self._retention_at = 0.0
        self._touch_at = 0.0
        self._complaints: dict[str, str] = {}  # by task: what was said last
        self.cpu_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="inferdbg-seal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def seal(self, stream: Path) -> None:
        """A stream that is complete. Does not wait."""
        self._streams.put(stream)
        self._wake.set()

    def core(self, event: CoreStarted | EngineLost) -> None:
        """A core that started or was lost. Does not wait."""
        self._cores.put(event)
        self._wake.set()

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Seals what is left, then ends the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait(_PERIOD_SECONDS)
            self._wake.clear()
            closing = self._closing.is_set()
            for task in (self._write_files, self._seal_streams, self._retain):
                self._attempt(task)
            self.cpu_seconds = time.thread_time()
            if closing:
                return

    def _attempt(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # the disk, or a fault of ours: neither may end this thread
            complaint = f"{type(error).__name__}: {error}"
            if self._complaints.get(task.__name__) != complaint:
                self._complaints[task.__name__] = complaint
                _log.warning(
                    "the run in %s cannot be kept (%s); serving goes on, losses are counted", self._run_dir, complaint
                )
        else:
            self._complaints.pop(task.__name__, None)

    def _write_files(self) -> None:
        if not self._manifest.is_written:
            self._manifest.write()
        elif time.monotonic() >= self._touch_at:
            self._touch_at = time.monotonic() + _TOUCH_SECONDS
            self._manifest.touch()
        while True:
            try:
                event = self._cores.get_nowait()
            except queue.Empty:
                break
            self._note(event)
        counts = self._counts()
        if self._file is None and (any(counts["dropped"].values()) or self._deleted):
            self._file = ReplicaFile(self._run_dir, self._replica, 0)
        if self._file is not None:
            self._file.update(**counts)

    def _counts(self) -> dict[str, Any]:
        return {"dropped": self._losses.counts(), "deleted": self._deleted.to_json()}

    def _note(self, event: CoreStarted | EngineLost) -> None:
        fields: dict[str, Any]
        if isinstance(event, CoreStarted):
            self._file = ReplicaFile(self._run_dir, self._replica, event.incarnation)
            fields = {"core": {"pid": event.pid, "started_ns": event.time_ns, "info": dict(event.info)}}
        else:
            self._file = self._file or ReplicaFile(self._run_dir, self._replica, event.incarnation)
            lost = {"time_ns": event.time_ns, "reason": event.reason, "request_ids": list(event.request_ids)}
            fields = {"lost": lost}
        self._file.update(**fields, **self._counts())

    def _seal_streams(self) -> None:
        while True:
            try:
                self._unsealed.append(self._streams.get_nowait())
            except queue.Empty:
                break
        while self._unsealed:
            stream = self._unsealed.pop(0)
            try:
                if seal_stream(stream) is None and stream.exists():
                    _log.warning("%s is damaged and stays as it is", stream)
            except FileNotFoundError:
                continue
            except OSError:
                self._unsealed.insert(0, stream)  # the disk is full: again next time
                raise

    def _retain(self) -> None:
        if not self._closing.is_set() and time.monotonic() < self._retention_at:
            return
        self._retention_at = time.monotonic() + _RETENTION_SECONDS
        if self._retention.max_bytes is None and self._retention.max_seconds is None:
            return
        apply_retention(self._run_dir, self._retention, announce=self._announce_deletion)

    def _announce_deletion(self, segments: Sequence[Segment]) -> None:
        self._deleted.add(segments)
        with contextlib.suppress(OSError):  # a full disk is why retention is needed: it is said once there is room
            self._write_files()
