"""Reads the segments of one table, sealed or live, in batches. Knows no manifest and no meaning of a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inferdbg.tracing.checksum import file_is_whole
from inferdbg.tracing.frames import StreamTail, read_frames
from inferdbg.tracing.run_files import SEALED_SUFFIX, STREAM_SUFFIX
from inferdbg.tracing.schema import conform

__all__ = ["SegmentName", "SegmentReader", "list_segments"]

_BATCH_ROWS = 512


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
        parts = stem.rsplit(".", 2)
        if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]))


def list_segments(directory: Path) -> list[SegmentName]:
    """The segments there are, each once, whether sealed, live or (for a moment) both."""
    names = set()
    for path in directory.glob("*"):
        if path.suffix in (SEALED_SUFFIX, STREAM_SUFFIX) and (name := SegmentName.parse(path.stem)):
            names.add(name)
    return sorted(names)


class SegmentReader:
    """One table. What could not be read is said in `warnings`, once per file."""

    def __init__(self, directory: Path, schema: Any, *, is_live: bool) -> None:
        self._directory = directory
        self._schema = schema
        self._is_live = is_live
        self._checked: set[Path] = set()
        self.warnings: dict[str, str] = {}

    def segments(self) -> list[SegmentName]:
        return list_segments(self._directory)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """All segments' record batches, with the schema's columns (or those named). Raises KeyError for other names."""
        for name in self.segments():
            yield from self.segment(name, columns)

    def segment(self, name: SegmentName, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """One segment's record batches. Parquet is preferred; a segment that is gone (retention) has none."""
        schema = self._schema if columns is None else pa.schema([self._schema.field(column) for column in columns])
        sealed = self._directory / f"{name}{SEALED_SUFFIX}"
        stream = self._directory / f"{name}{STREAM_SUFFIX}"
        if not sealed.exists() and stream.exists():
            try:
                yield from self._stream(stream, schema)
                return
            except FileNotFoundError:
                pass  # sealed between the look and the opening
        if sealed.exists():
            yield from self._sealed(sealed, schema)

    def _stream(self, path: Path, schema: Any) -> Iterator[Any]:
        tail = StreamTail()
        for batch in read_frames(path, tail):
            conformed = self._conform(batch, schema, path)
            if conformed is not None:
                yield conformed
        # a live writer's last message may be half there at the moment of the look
        if tail.damage is not None and not (self._is_live and tail.damage.startswith("torn")):
            self._warn(path, f"{tail.damage}; read up to there")

    def _sealed(self, path: Path, schema: Any) -> Iterator[Any]:
        try:
            if path not in self._checked and not file_is_whole(path):
                # what its page checksums vouch for is still worth more than nothing
                self._warn(path, "checksum mismatch; what is read of it may be incomplete")
            self._checked.add(path)
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                present = [field.name for field in schema if field.name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=present):
                    conformed = self._conform(batch, schema, path)
                    if conformed is not None:
                        yield conformed
        except FileNotFoundError:
            return
        except Exception as error:  # altered bytes make the library raise many things
            self._warn(path, f"{_first_line(error)}; the rest of the segment is not read")

    def _conform(self, batch: Any, schema: Any, path: Path) -> Any:
        try:
            return conform(batch, schema)
        except pa.ArrowException as error:
            self._warn(path, f"a column cannot be read as this version knows it: {_first_line(error)}")
            return None

    def _warn(self, path: Path, what: str) -> None:
        place = f"{path.parent.name}/{path.name}"
        self.warnings.setdefault(place, f"{place}: {what}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
