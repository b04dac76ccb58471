"""Turns complete Arrow streams into Parquet that any tool reads. Knows columns only by their kind of content."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inferdbg.tracing.checksum import BLANK, seal_file
from inferdbg.tracing.frames import StreamTail, read_frames
from inferdbg.tracing.run_files import SEALED_SUFFIX

__all__ = ["seal_stream", "sync_directory", "write_parquet"]

CRC_KEY = "inferdbg.crc"
_ROW_GROUP_BYTES = 8 << 20
# Measured on rows of 200 tokens: ids plain, logprobs split by byte, growing numbers as deltas.
_DELTA = {"token_offsets_ns.list.element", "token_steps.list.element", "start_ns", "end_ns", "step", "arrival_ns"}
_SPLIT = {"output_logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"}
_SPLIT_LEAVES = {f"{name}.list.element" for name in (*_SPLIT, "sampled_logprobs", "sampled_top_logprobs")}


def seal_stream(stream: Path) -> Path | None:
    """Writes the Parquet file beside the stream and removes the stream.

    Returns None, and leaves the stream, where it is damaged or holds no row (then it is removed).

    Raises:
        OSError: the disk failed; the stream stays and nothing half-made is left under a final name.
    """
    tail = StreamTail()
    target = stream.with_suffix(SEALED_SUFFIX)
    written = write_parquet(read_frames(stream, tail), target, mtime_ns=stream.stat().st_mtime_ns, accept=tail)
    if tail.damage is not None:
        return None
    stream.unlink()
    return target if written else None


def write_parquet(batches: Iterable[Any], target: Path, *, mtime_ns: int, accept: StreamTail | None = None) -> bool:
    """Written beside, synced, renamed. Returns whether there were rows; without rows there is no file.

    `accept` is looked at once the batches are used up: a damaged source is not made into a good-looking file.
    """
    beside = target.with_suffix(target.suffix + ".tmp")
    writer: pq.ParquetWriter | None = None
    try:
        for table in _row_groups(batches):
            writer = writer or pq.ParquetWriter(str(beside), table.schema, **_options(table.schema))
            writer.write_table(table)
        if writer is None:
            return False
        writer.add_key_value_metadata({CRC_KEY: BLANK.decode()})
        writer.close()
        if accept is not None and accept.damage is not None:
            return False
        seal_file(beside)  # page checksums leave out the pages' headers and the footer
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        beside.chmod(0o600)
        os.utime(beside, ns=(mtime_ns, mtime_ns))  # a segment's age is that of its last row
        os.rename(beside, target)
        sync_directory(target.parent)
        return True
    finally:
        beside.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Makes a rename in the directory durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _row_groups(batches: Iterable[Any]) -> Iterator[Any]:
    group: list[Any] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= _ROW_GROUP_BYTES:
            yield pa.Table.from_batches(group).combine_chunks()
            group, size = [], 0
    if group:
        yield pa.Table.from_batches(group).combine_chunks()


def _options(schema: Any) -> dict[str, Any]:
    encodings: dict[str, str] = {}
    dictionary: list[str] = []
    for path, kind in _leaves(schema):
        if path in _DELTA:
            encodings[path] = "DELTA_BINARY_PACKED"
        elif path in _SPLIT_LEAVES:
            encodings[path] = "BYTE_STREAM_SPLIT"
        elif pa.types.is_string(kind):
            dictionary.append(path)
    return {
        "compression": "zstd",
        "use_dictionary": dictionary,
        "column_encoding": encodings,
        "write_page_checksum": True,
        "store_schema": True,
    }


def _leaves(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields:
        yield from _leaf(prefix + field.name, field.type)


def _leaf(path: str, kind: Any) -> Iterator[tuple[str, Any]]:
    if pa.types.is_list(kind):
        yield from _leaf(path + ".list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        yield from _leaves((kind.field(i) for i in range(kind.num_fields)), path + ".")
    else:
        yield path, kind
