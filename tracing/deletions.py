"""What retention deleted of a run: counted while it is written, summed when it is read. Knows no rule of retention.

{"segments": 3, "bytes": 91234, "tables": {"requests": {"segments": 1, "rows": 400},
                                          "spans": {"segments": 2, "rows": null}}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inferdbg.tracing.retention import Segment
from inferdbg.tracing.run_files import SEALED_SUFFIX

__all__ = ["Deletions", "sum_deleted"]


class Deletions:
    """The writer's count. A segment that could not be deleted and is tried again counts once."""

    def __init__(self) -> None:
        self._counted: set[Path] = set()
        self._document = sum_deleted(())

    def __bool__(self) -> bool:
        return bool(self._counted)

    def add(self, segments: Sequence[Segment]) -> None:
        """Segments that are about to be deleted: their rows can still be counted."""
        for segment in segments:
            if segment.path in self._counted:
                continue
            self._counted.add(segment.path)
            table = {segment.table: {"segments": 1, "rows": _num_rows(segment.path)}}
            self._document = sum_deleted([self._document, {"segments": 1, "bytes": segment.size, "tables": table}])

    def to_json(self) -> dict[str, Any]:
        return self._document


def sum_deleted(documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The documents of several writers as one. Rows that one of them does not know are null in the sum."""
    total: dict[str, Any] = {"segments": 0, "bytes": 0, "tables": {}}
    for document in documents:
        for name in ("segments", "bytes"):
            total[name] += int(document.get(name) or 0)
        for table, counts in (document.get("tables") or {}).items():
            sofar = total["tables"].get(table, {"segments": 0, "rows": 0})
            rows = (sofar["rows"], counts.get("rows"))
            total["tables"][table] = {
                "segments": sofar["segments"] + int(counts.get("segments") or 0),
                "rows": None if None in rows else sum(rows),
            }
    return total


def _num_rows(path: Path) -> int | None:
    if path.suffix != SEALED_SUFFIX:
        return None  # spans: nobody counts their lines
    import pyarrow.parquet as pq  # a reader of the rules of retention needs none of it

    try:
        return int(pq.read_metadata(path).num_rows)
    except Exception:  # altered bytes make the library raise many things
        return None
