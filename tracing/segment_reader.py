"""Reads the segments of one table, sealed or live, in batches. Knows no manifest and no meaning of a column.

A reader sees the table as it was when it was first looked at: the segments of that moment, and of the live ones the
bytes of that moment, however often it reads and whatever is written, sealed or renamed meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inferdbg.tracing.checksum import file_is_whole
from inferdbg.tracing.frames import OpenStream, StreamTail, open_stream, read_stream
from inferdbg.tracing.run_files import SEALED_SUFFIX, STREAM_SUFFIX, SegmentName
from inferdbg.tracing.schema import conform

__all__ = ["SegmentReader"]

_BATCH_ROWS = 512


@dataclass(frozen=True, slots=True)
class _Seen:
    """A segment at the moment of the look: a stream with its bytes of then, or (None) a sealed one."""

    name: SegmentName
    stream: OpenStream | None


class SegmentReader:
    """One table. What could not be read is said in `warnings`, once per file."""

    def __init__(self, directory: Path, schema: Any, *, is_live: bool) -> None:
        self._directory = directory
        self._schema = schema
        self._is_live = is_live
        self._seen: list[_Seen] | None = None
        self._checked: set[Path] = set()
        self.warnings: dict[str, str] = {}

    def look(self) -> None:
        """Fixes what is read from now on. Without it, the first reading does."""
        if self._seen is None:
            self._seen = [_Seen(name, self._open(name)) for name in self._listed()]

    def segments(self) -> list[SegmentName]:
        self.look()
        return [seen.name for seen in self._seen or ()]

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """All segments' record batches, with the schema's columns (or those named). Raises KeyError for other names."""
        for name in self.segments():
            yield from self.segment(name, columns)

    def segment(self, name: SegmentName, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """One segment's record batches. Parquet is preferred; a segment that is gone (retention) has none."""
        schema = self._schema if columns is None else pa.schema([self._schema.field(column) for column in columns])
        self.look()
        for seen in self._seen or ():
            if seen.name == name:
                yield from self._sealed(name, schema) if seen.stream is None else self._stream(seen, schema)

    def _listed(self) -> list[SegmentName]:
        """The segments there are, each once, whether sealed, live or (for a moment) both."""
        paths = (path for path in self._directory.glob("*") if path.suffix in (SEALED_SUFFIX, STREAM_SUFFIX))
        return sorted({name for path in paths if (name := SegmentName.parse(path.stem)) is not None})

    def _open(self, name: SegmentName) -> OpenStream | None:
        """The live stream, held open: it stays readable when it is sealed and removed."""
        if (self._directory / f"{name}{SEALED_SUFFIX}").exists():
            return None
        with contextlib.suppress(FileNotFoundError):  # sealed between the look and the opening
            return open_stream(self._directory / f"{name}{STREAM_SUFFIX}")
        return None

    def _stream(self, seen: _Seen, schema: Any) -> Iterator[Any]:
        assert seen.stream is not None
        path = self._directory / f"{seen.name}{STREAM_SUFFIX}"
        tail = StreamTail()
        for batch in read_stream(seen.stream, tail):
            conformed = self._conform(batch, schema, path)
            if conformed is not None:
                yield conformed
        # a live writer's last message may be half there at the moment of the look
        if tail.damage is not None and not (self._is_live and tail.damage.startswith("torn")):
            self._warn(path, f"{tail.damage}; read up to there")

    def _sealed(self, name: SegmentName, schema: Any) -> Iterator[Any]:
        path = self._directory / f"{name}{SEALED_SUFFIX}"
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
