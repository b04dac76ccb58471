"""Bounds a recording: deletes the oldest sealed segments, keeps pinned stretches, never touches a live one.

A segment's end is its file's time (sealing keeps it); its start is the end of the segment before it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from inferdbg.engine.errors import UsageError
from inferdbg.tracing.run_files import (
    SEALED_SUFFIX,
    SEGMENT_SECONDS,
    SPANS,
    SPANS_SUFFIX,
    STREAM_SUFFIX,
    TABLE_NAMES,
    SegmentName,
)

__all__ = ["DEFAULT_RETENTION", "PINS_FILE", "Pin", "Retention", "Segment", "apply_retention", "parse_retention"]

PINS_FILE = "pins"
_UNITS_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_UNITS_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass(frozen=True, slots=True)
class Retention:
    """What may be kept; None: no limit of that kind."""

    max_seconds: float | None = None
    max_bytes: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.max_seconds:g}s"] if self.max_seconds is not None else []
        if self.max_bytes is not None:
            unit = next((u for u, b in reversed(_UNITS_BYTES.items()) if self.max_bytes % b == 0), "kb")
            parts.append(f"{self.max_bytes / _UNITS_BYTES[unit]:.12g}{unit.upper()}")
        return ",".join(parts) or "off"


DEFAULT_RETENTION = Retention(max_bytes=10 * 10**9)


@dataclass(frozen=True, slots=True)
class Pin:
    """A stretch that is kept, in Unix seconds: a line of JSON in the run's file `pins`, for as long as it is there."""

    start: float
    end: float
    why: str = ""


def parse_retention(text: str) -> Retention:
    """Reads ``24h``, ``10GB``, ``7d,10GB`` or ``off``.

    Raises:
        UsageError: it is none of these.
    """
    if text.strip().lower() == "off":
        return Retention()
    seconds: float | None = None
    size: int | None = None
    for part in text.lower().replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", part)
        amount, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if amount > 0 and unit in _UNITS_SECONDS and seconds is None:
            seconds = amount * _UNITS_SECONDS[unit]
        elif amount > 0 and unit in _UNITS_BYTES and size is None:
            size = int(amount * _UNITS_BYTES[unit])
        else:
            raise UsageError(
                f"--retain takes an age (30m, 24h, 7d), a size (500MB, 10GB), both, or off; {text!r} given"
            )
    return Retention(seconds, size)


def read_pins(run_dir: Path) -> list[Pin]:
    """The pinned stretches; a line that is none is passed over."""
    pins = []
    try:
        lines = (run_dir / PINS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            entry = json.loads(line)
            pins.append(Pin(float(entry["start"]), float(entry["end"]), str(entry.get("why", ""))))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return pins


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed segment of a table, or a complete file of spans."""

    path: Path
    start: float
    end: float
    size: int

    @property
    def table(self) -> str:
        return self.path.parent.name


def apply_retention(
    run_dir: Path,
    retention: Retention,
    now: float | None = None,
    *,
    announce: Callable[[Sequence[Segment]], None] = lambda segments: None,
) -> list[Segment]:
    """Deletes the oldest sealed segments until the run fits; returns them, oldest first. `now` is Unix seconds.

    Looks at nothing but the run's own tables and spans. The live segments count towards the size but are never
    deleted, nor is anything pinned. `announce` is told first what is about to go, so that a run never lacks a
    segment without saying so, whenever its writer is killed.
    """
    now = time.time() if now is None else now
    pins = read_pins(run_dir)
    files = list(_files(run_dir))
    total = sum(file.size for file in files)
    doomed = []
    for segment in sorted(_sealed(files), key=lambda s: (s.end, str(s.path))):
        too_old = retention.max_seconds is not None and segment.end < now - retention.max_seconds
        too_much = retention.max_bytes is not None and total > retention.max_bytes
        if not (too_old or too_much):
            continue
        if any(p.start <= segment.end and p.end >= segment.start for p in pins):
            continue
        doomed.append(segment)
        total -= segment.size
    if doomed:
        announce(doomed)
    for segment in doomed:
        segment.path.unlink(missing_ok=True)
    return doomed


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    name: SegmentName
    changed: float
    size: int


def _files(run_dir: Path) -> Iterator[_File]:
    """The segments, live and sealed; what else lies in the run or beside it is not ours to touch."""
    for table in (*TABLE_NAMES, SPANS):
        suffixes = (SPANS_SUFFIX,) if table == SPANS else (SEALED_SUFFIX, STREAM_SUFFIX)
        for path in (run_dir / table).glob("*"):
            name = SegmentName.parse(path.stem)
            if name is None or path.suffix not in suffixes or path.is_symlink():
                continue
            with contextlib.suppress(FileNotFoundError):  # sealed since the listing
                status = path.stat()
                yield _File(path, name, status.st_mtime, status.st_size)


def _sealed(files: Iterable[_File]) -> Iterator[Segment]:
    """Sealed segments of every table; of `spans/`, all files but each writer's last, which is being written."""
    groups: dict[tuple[Path, str], list[_File]] = {}
    for file in files:
        if file.path.suffix != STREAM_SUFFIX:
            groups.setdefault((file.path.parent, file.name.replica), []).append(file)
    for (parent, _), group in groups.items():
        group.sort(key=lambda file: file.name)
        before: float | None = None
        for file in group[:-1] if parent.name == SPANS else group:
            start = before if before is not None else file.changed - SEGMENT_SECONDS
            yield Segment(file.path, start, file.changed, file.size)
            before = file.changed
