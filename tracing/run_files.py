"""Where things lie in a run directory, and how its small JSON files are written. Knows none of their contents."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "MANIFEST", "REPLICAS", "SEALED_SUFFIX", "SEGMENT_SECONDS", "SPANS", "SPANS_SUFFIX", "STREAM_SUFFIX",
    "TABLE_NAMES", "TOKENIZER", "SegmentName", "make_private", "read_json", "require_objects", "write_json",
]  # fmt: skip

MANIFEST = "run.json"
REPLICAS = "replicas"
TABLE_NAMES = ("arrivals", "requests", "steps")
TOKENIZER = "tokenizer"
SPANS = "spans"
STREAM_SUFFIX = ".arrows"  # a live segment
SEALED_SUFFIX = ".parquet"
SPANS_SUFFIX = ".jsonl"
SEGMENT_SECONDS = 600.0  # a live segment is closed at this age


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """``<replica>.<incarnation>.<seq>``, in order of writing per replica."""

    replica: str
    incarnation: int
    seq: int

    def __str__(self) -> str:
        return f"{self.replica}.{self.incarnation}.{self.seq:06d}"

    @classmethod
    def parse(cls, stem: str) -> SegmentName | None:
        """None: the stem is not of that form, so the file is none of ours."""
        parts = stem.rsplit(".", 2)
        if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]))


def make_private(directory: Path) -> None:
    """A directory for its owner alone. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replaces the file as a whole: a reader sees the old or the new one. Raises OSError."""
    make_private(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(document, file, indent=2, ensure_ascii=False, default=str)
            file.write("\n")
        os.rename(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def require_objects(document: dict[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError where one of these members is there and no object."""
    for name in names:
        if not isinstance(document.get(name) or {}, dict):
            raise ValueError(f"{name} is no object")


def read_json(path: Path) -> dict[str, Any]:
    """Raises OSError or ValueError (also where the document is no object, or nested beyond reason)."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} holds no object")
    return document
