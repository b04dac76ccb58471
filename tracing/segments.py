"""Writes one table of a run as a row of segments. Knows files and failures, no columns and no events.

    <replica>.<incarnation>.<seq>.arrows    being written: an Arrow IPC stream, see `frames`
    <replica>.<incarnation>.<seq>.parquet   sealed: written beside, synced, renamed, then the stream is removed

One writer per file. A write that fails is taken back to the last whole message, so what is on disk stays readable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferdbg.tracing.frames import END_MARK, FrameEncoder
from inferdbg.tracing.run_files import SEALED_SUFFIX, SEGMENT_SECONDS, STREAM_SUFFIX, SegmentName

__all__ = ["SEGMENT_BYTES", "SegmentFile", "TableWriter"]

SEGMENT_BYTES = 32 << 20
_RETRY_SECONDS = 1.0

_log = logging.getLogger(__name__)


class SegmentFile:
    """The file being appended to. All or nothing: after a failed `append` the file is as before."""

    def __init__(self, path: Path) -> None:
        """Raises OSError; FileExistsError where another writer has the name."""
        self.path = path
        self.opened = time.monotonic()
        self.size = 0
        self.num_items = 0  # rows or spans in it
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def append(self, data: bytes, num_items: int = 0) -> None:
        """Hands the bytes, which hold `num_items`, to the kernel: a killed process loses nothing. Raises OSError."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(data)
        self.num_items += num_items

    def close(self) -> None:
        os.close(self._fd)

    def close_if_gone(self) -> bool:
        """Lets go of a file whose path no longer leads to it: what is appended would be lost unseen. Says so."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                return False
        except OSError:
            pass  # the path leads nowhere
        self.close()
        _log.warning("%s was deleted or moved away; what it held (%d) is lost and counted", self.path, self.num_items)
        return True

    @property
    def is_full(self) -> bool:
        return self.size >= SEGMENT_BYTES or time.monotonic() - self.opened >= SEGMENT_SECONDS


class TableWriter:
    """Appends record batches of one table. Used from one thread.

    Args:
        directory: of the table; made when first needed.
        keep_bytes: what may wait in memory for a disk that fails; 0: a batch that cannot be written is lost.
        on_closed: told each stream that is complete, to be sealed.
    """

    def __init__(
        self, directory: Path, schema: Any, replica: str, *, keep_bytes: int, on_closed: Callable[[Path], None]
    ) -> None:
        self._directory = directory
        self._encoder = FrameEncoder(schema)
        self._replica = replica
        self._keep_bytes = keep_bytes
        self._on_closed = on_closed
        self._incarnation = 0
        self._seq = 0
        self._file: SegmentFile | None = None
        self._waiting: deque[tuple[bytes, int]] = deque()  # frames and their rows, oldest first
        self._waiting_bytes = 0
        self._retry_at = 0.0
        self._complained = False

    def write(self, batch: Any) -> int:
        """Appends a batch; returns how many rows were lost by this call (of this batch or of older, kept ones)."""
        frame = self._encoder.frame(batch)
        self._waiting.append((frame, batch.num_rows))
        self._waiting_bytes += len(frame)
        return self.pump()

    def pump(self) -> int:
        """Writes what waits, if the disk takes it; rolls a segment that is full. Returns how many rows were lost."""
        lost = self._drop_gone_segment()
        if self._waiting and time.monotonic() >= self._retry_at:
            try:
                self._drain()
            except OSError as error:
                self._fail(error)
        if self._file is not None and self._file.is_full:
            self._close_segment()
        while self._waiting and self._waiting_bytes > self._keep_bytes:
            frame, rows = self._waiting.popleft()
            self._waiting_bytes -= len(frame)
            lost += rows
        return lost

    def set_incarnation(self, incarnation: int) -> None:
        """Rows of a new core go to segments of their own."""
        if incarnation != self._incarnation:
            self._close_segment()
            self._incarnation, self._seq = incarnation, 0

    def close(self) -> int:
        """Writes what waits, closes the segment; returns how many rows could not be written."""
        self._retry_at = 0.0
        lost = self.pump() + sum(rows for _, rows in self._waiting)
        self._waiting.clear()
        self._close_segment()
        return lost

    def _drain(self) -> None:
        while self._waiting:
            file = self._file or self._open()
            frame, rows = self._waiting[0]
            file.append(frame, rows)
            self._waiting.popleft()
            self._waiting_bytes -= len(frame)
        self._complained = False

    def _drop_gone_segment(self) -> int:
        """Returns how many rows went with a segment that somebody deleted or moved away."""
        if self._file is None or not self._file.close_if_gone():
            return 0
        file, self._file = self._file, None
        return file.num_items

    def _open(self) -> SegmentFile:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            name = str(SegmentName(self._replica, self._incarnation, self._seq))
            if not (self._directory / (name + SEALED_SUFFIX)).exists():
                with contextlib.suppress(FileExistsError):
                    file = SegmentFile(self._directory / (name + STREAM_SUFFIX))
                    break
            self._seq += 1
        try:
            file.append(self._encoder.opening())
        except OSError:
            file.close()
            file.path.unlink(missing_ok=True)
            raise
        self._seq += 1  # only now: the next try takes the same number, so that numbers have no holes
        self._file = file
        return file

    def _fail(self, error: OSError) -> None:
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if not self._complained:
            self._complained = True
            _log.warning("cannot write to %s: %s; serving goes on, losses are counted", self._directory, error.strerror)

    def _close_segment(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with contextlib.suppress(OSError):  # without its end mark it reads as cut on a boundary, which is what it is
            file.append(END_MARK)
        file.close()
        self._on_closed(file.path)
