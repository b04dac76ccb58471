"""Arrow IPC streams, message by message, each with a CRC over all its bytes. Knows no table and no directory.

An Arrow reader takes such a file as an ordinary IPC stream. The CRC sits in the message's own custom metadata; see
`checksum`.

    schema message | batch message | batch message | … | end mark
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from inferdbg.tracing.checksum import BLANK, is_whole, seal

__all__ = ["END_MARK", "FrameEncoder", "OpenStream", "StreamTail", "open_stream", "read_frames", "read_stream"]

END_MARK = bytes.fromhex("ffffffff00000000")
_KEY = b"inferdbg.crc"


class FrameEncoder:
    """Messages of streams of one schema."""

    def __init__(self, schema: Any) -> None:
        self._marked = schema.with_metadata({_KEY: BLANK})
        self._opening_size = self._marked.serialize().size

    def opening(self) -> bytes:
        """The message that opens a stream."""
        return seal(bytearray(self._marked.serialize().to_pybytes()))

    def frame(self, batch: Any) -> bytes:
        """One record batch as a message."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._marked) as writer:
            writer.write_batch(batch, custom_metadata={_KEY: BLANK})
        return seal(bytearray(memoryview(sink.getvalue())[self._opening_size : -len(END_MARK)]))


class StreamTail:
    """How reading a stream ended; filled in by `read_frames`."""

    def __init__(self) -> None:
        self.closed = False  # the end mark was there: nothing follows
        self.damage: str | None = None  # what is wrong with what follows the last good batch
        self.good_bytes = 0  # up to here every message is whole


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream held open, and its bytes of the moment it was opened; what is appended later is not read."""

    file: Any  # pyarrow's; closes itself with its last user
    size: int


def open_stream(path: Path) -> OpenStream:
    """Raises OSError; FileNotFoundError where it is gone."""
    file = pa.OSFile(str(path), "rb")
    return OpenStream(file, int(file.size()))


def read_frames(path: Path, tail: StreamTail) -> Iterator[Any]:
    """`read_stream` of a file as it is now. Raises OSError where it cannot be opened."""
    yield from read_stream(open_stream(path), tail)


def read_stream(stream: OpenStream, tail: StreamTail) -> Iterator[Any]:
    """Record batches up to the end, or to the first message that is torn or altered. `tail` says which.

    A file that is being written ends without an end mark and without damage.
    """
    file, size = stream.file, stream.size
    schema: Any = None
    while tail.good_bytes < size:
        start = tail.good_bytes
        file.seek(start)
        if file.read(len(END_MARK)) == END_MARK:
            tail.closed = True
            tail.good_bytes += len(END_MARK)
            if tail.good_bytes < size:
                tail.damage = f"{size - tail.good_bytes} bytes follow the end mark"
            return
        try:
            file.seek(start)
            message = pa.ipc.read_message(file)
            end = int(file.tell())
        except (pa.ArrowInvalid, OSError, EOFError, MemoryError) as error:
            tail.damage = f"torn at byte {start} of {size} ({type(error).__name__})"
            return
        if end > size:
            tail.damage = f"torn at byte {start} of {size} (its rest came later)"
            return
        file.seek(start)
        if not is_whole(file.read(end - start)):
            tail.damage = f"checksum mismatch at byte {start} of {size}"
            return
        if schema is None:
            schema = pa.ipc.read_schema(message).remove_metadata()
            tail.good_bytes = end
            continue
        batch = pa.ipc.read_record_batch(message, schema)
        tail.good_bytes = end
        yield batch
