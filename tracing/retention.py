"""Bounds a recording: deletes the oldest sealed segments, keeps pinned stretches, never touches a live one.

A segment's end is its file's time (sealing keeps it); its start is the end of the segment before it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferdbg.engine.errors import UsageError
from inferdbg.tracing.run_files import SEALED_SUFFIX, SEGMENT_SECONDS, SPANS, SPANS_SUFFIX

__all__ = ["DEFAULT_RETENTION", "PINS_FILE", "Deleted", "Pin", "Retention", "apply_retention", "parse_retention", "pin"]

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
        parts += [f"{self.max_bytes / 10**6:g}MB"] if self.max_bytes is not None else []
        return ",".join(parts) or "off"


DEFAULT_RETENTION = Retention(max_bytes=10 * 10**9)


@dataclass(frozen=True, slots=True)
class Pin:
    """A stretch that is kept, in Unix seconds."""

    start: float
    end: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Deleted:
    """What one pass of retention deleted."""

    segments: int = 0
    bytes: int = 0


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


def pin(run_dir: Path, stretch: Pin) -> None:
    """Keeps the segments that touch the stretch, until its line is taken out of the file."""
    with open(run_dir / PINS_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"start": stretch.start, "end": stretch.end, "why": stretch.why}) + "\n")


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
class _Segment:
    path: Path
    start: float
    end: float
    size: int


def apply_retention(run_dir: Path, retention: Retention, now: float | None = None) -> Deleted:
    """Deletes the oldest sealed segments until the run fits. `now` is Unix seconds.

    The live segments count towards the size but are never deleted, nor is anything pinned.
    """
    now = time.time() if now is None else now
    pins = read_pins(run_dir)
    segments = sorted(_sealed(run_dir), key=lambda s: (s.end, str(s.path)))
    total = sum(path.stat().st_size for path in _files(run_dir))
    count = freed = 0
    for segment in segments:
        too_old = retention.max_seconds is not None and segment.end < now - retention.max_seconds
        too_much = retention.max_bytes is not None and total > retention.max_bytes
        if not (too_old or too_much):
            continue
        if any(p.start <= segment.end and p.end >= segment.start for p in pins):
            continue
        segment.path.unlink(missing_ok=True)
        total -= segment.size
        freed += segment.size
        count += 1
    return Deleted(count, freed)


def _files(run_dir: Path) -> Iterator[Path]:
    for path in run_dir.rglob("*"):
        if path.is_file():
            yield path


def _sealed(run_dir: Path) -> Iterator[_Segment]:
    """Sealed segments of every table; of `spans/`, all files but each writer's last, which is being written."""
    groups: dict[tuple[Path, str], list[Path]] = {}
    for path in _files(run_dir):
        if path.suffix == SEALED_SUFFIX or (path.suffix == SPANS_SUFFIX and path.parent.name == SPANS):
            writer = path.name.split(".")[0]
            groups.setdefault((path.parent, writer), []).append(path)
    for (parent, _), paths in groups.items():
        before: float | None = None
        ordered = sorted(paths, key=lambda p: (p.stat().st_mtime, p.name))
        for path in ordered[:-1] if parent.name == SPANS else ordered:
            status = path.stat()
            start = before if before is not None else status.st_mtime - SEGMENT_SECONDS
            yield _Segment(path, start, status.st_mtime, status.st_size)
            before = status.st_mtime
