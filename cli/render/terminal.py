"""The two consoles and the small shapes that every report is made of: numbers with units, bars, tables.

Knows no verb. Text from prompts, models and runs must have been through `inferdbg.probes.text` before it comes here;
`warn` and `print_json` see to that themselves.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, cast

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferdbg.probes.text import is_invisible, message_text, printable, valid_unicode

__all__ = [
    "PrintableFormatter", "bar", "count", "diagnostics", "duration", "output", "print_json", "print_json_list", "share",
    "table", "warn",
]  # fmt: skip

PLAIN_WIDTH = 120  # of lines that go to a file or a pipe
BAR_WIDTH = 30


def output() -> Console:
    """The console for data: stdout."""
    return _console(sys.stdout)


def diagnostics() -> Console:
    """The console for progress and warnings: stderr."""
    return _console(sys.stderr)


def warn(message: str) -> None:
    """One line of diagnostics. It may quote a run, a file name or an error as it is."""
    diagnostics().print(Text(f"inferdbg: {printable(message)}"), soft_wrap=True)


class PrintableFormatter(logging.Formatter):
    """Of log messages, which may quote a request, a file name or an error."""

    def format(self, record: logging.LogRecord) -> str:
        return message_text(super().format(record))


def print_json(document: Mapping[str, Any]) -> None:
    """One document on stdout, on one line: null for what JSON cannot say, such as -inf; what a terminal would obey
    or hide is escaped, which means the same to every reader of JSON."""
    sys.stdout.write(_json(document) + "\n")


def print_json_list(document: Mapping[str, Any], name: str, items: Iterator[Mapping[str, Any]]) -> None:
    """One document with one more field, `name`, whose items are written one a line as they come."""
    sys.stdout.write(f"{_json(document)[:-1]},{_json(name)}:[")
    separator = "\n"
    for item in items:
        sys.stdout.write(separator + _json(item))
        separator = ",\n"
    sys.stdout.write("\n]}\n")


def _json(document: Any) -> str:
    try:
        text = msgspec.json.encode(document).decode()
    except UnicodeEncodeError:  # a file name that is no UTF-8
        text = msgspec.json.encode(_encodable(document)).decode()
    return re.sub(r"[^\x00-\x7e]", lambda match: _json_escaped(match[0]), text)


def _json_escaped(char: str) -> str:
    if not is_invisible(char):
        return char
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return valid_unicode(value)
        case Mapping():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
        case list() | tuple():
            return [_encodable(item) for item in value]
        case _:
            return value


def _console(stream: IO[str]) -> Console:
    # Without a terminal rich would fold lines to 80 columns; $COLUMNS still wins.
    width = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    file = stream if stream.isatty() else cast(IO[str], _WithoutPadding(stream))
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


class _WithoutPadding:
    """A file or a pipe, without the blanks with which tables fill their lines."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def duration(seconds: float | None) -> str:
    """Three significant digits and a unit: ``812 µs``, ``45.1 ms``, ``2.31 s``, ``3 min 05 s``."""
    if seconds is None:
        return "–"
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if abs(seconds) * scale < 999.5:
            return f"{_three(seconds * scale)} {unit}"
    if seconds < 119.5:
        return f"{_three(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def count(number: int, noun: str) -> str:
    """``1 request``, ``24 requests``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def share(part: float, whole: float) -> str:
    """A percentage that never rounds something to nothing, or a part to the whole."""
    if whole <= 0:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "<0.1%"
    return f"{min(percent, 99.9) if part < whole else percent:.1f}%"


def bar(part: float, whole: float, width: int = BAR_WIDTH, style: str = "cyan") -> Text:
    """A bar of eighths; anything above zero shows."""
    eighths = 0 if whole <= 0 else round(8 * width * min(1.0, part / whole))
    if part > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else ""), style=style)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without side lines; columns named in `right` are numbers."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(Text(name), justify="right" if name in right else "left", no_wrap=True)
    return made
