"""A CRC-32 that stands inside the bytes it covers: ``crc32=<8 hex digits>``, taken with the digits zeroed.

So it covers lengths, metadata and body alike; a checksum of the body alone misses a flipped bit in a row count.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

__all__ = ["BLANK", "TAG", "file_is_whole", "is_whole", "seal", "seal_file"]

TAG = b"crc32="
BLANK = TAG + b"00000000"
_CHUNK = 1 << 20


def seal(data: bytearray) -> bytes:
    """Fills in the first blank. Raises ValueError where there is none."""
    at = data.index(BLANK)
    data[at : at + len(BLANK)] = _tagged(zlib.crc32(data))
    return bytes(data)


def is_whole(data: bytes) -> bool:
    """Whether the bytes are what `seal` gave."""
    at = data.find(TAG)
    if at < 0:
        return False
    end = at + len(BLANK)
    return data[at:end] == _tagged(zlib.crc32(data[:at] + BLANK + data[end:]))


def seal_file(path: Path) -> None:
    """Fills in the blank in a Parquet file's footer. Raises OSError; ValueError where there is none."""
    with open(path, "r+b") as file:
        start = _footer_start(file.fileno())
        file.seek(start)
        footer = file.read()
        at = footer.index(BLANK)
        crc = zlib.crc32(footer, _crc_up_to(file.fileno(), start))
        file.seek(start + at)
        file.write(_tagged(crc))


def file_is_whole(path: Path) -> bool:
    """Whether a Parquet file is what `seal_file` left; a file that was never sealed cannot be told, and is. OSError."""
    with open(path, "rb") as file:
        start = _footer_start(file.fileno())
        file.seek(start)
        footer = file.read()
        at = footer.find(TAG)
        if at < 0:
            return True
        end = at + len(BLANK)
        crc = zlib.crc32(footer[:at] + BLANK + footer[end:], _crc_up_to(file.fileno(), start))
        return footer[at:end] == _tagged(crc)


def _footer_start(fd: int) -> int:
    """Where the footer of a Parquet file begins: its length stands before the closing magic. 0 where that cannot be."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 4, max(0, size - 8)), "little")
    return max(0, size - 8 - length)


def _crc_up_to(fd: int, end: int) -> int:
    crc = 0
    for at in range(0, end, _CHUNK):
        crc = zlib.crc32(os.pread(fd, min(_CHUNK, end - at), at), crc)
    return crc


def _tagged(crc: int) -> bytes:
    return TAG + b"%08x" % crc
