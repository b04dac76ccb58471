"""Reads the values of flags that are more than a number: sizes, objectives, labels, bucket lists, key files."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from inferdbg.engine.errors import UsageError

__all__ = ["parse_buckets", "parse_size", "parse_slo", "read_key_file"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MIN_KEY_CHARS = 8


def parse_size(flag: str, text: str) -> int:
    """Bytes: ``1GiB``, ``500MB``, ``1048576``.

    Raises:
        UsageError: not a size above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise UsageError(f"{flag} takes a size such as 512MiB or 2GB, {text!r} given")
    return size


def parse_slo(text: str) -> float:
    """``ttft=0.5``: seconds.

    Raises:
        UsageError: it is not of that form.
    """
    match = re.fullmatch(r"ttft=(\d+(?:\.\d+)?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--slo takes ttft=SECONDS, {text!r} given")
    return float(match[1])


def parse_buckets(text: str) -> tuple[int, ...]:
    """Decode batch sizes to pad to, ascending: ``1,2,4,8,16``; empty for none.

    Raises:
        UsageError: not a list of sizes.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--decode-buckets takes batch sizes such as 1,2,4,8, {text!r} given")
    return tuple(sorted({int(part) for part in parts}))


def read_key_file(flag: str, path: Path | None) -> str | None:
    """The key on the first line of a file; None for no file. A key never comes from the command line or its logs.

    Raises:
        UsageError: the file cannot be read, is readable by others, or holds no usable key.
    """
    if path is None:
        return None
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not UTF-8"
        raise UsageError(f"{flag} {path}: {reason}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH) and not stat.S_ISFIFO(mode):
        raise UsageError(f"{flag} {path}: other users can read it; run chmod 600 {path}")
    key = lines[0].strip() if lines else ""
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{flag} {path}: the first line must be a key of at least {MIN_KEY_CHARS} ASCII characters")
    return key
