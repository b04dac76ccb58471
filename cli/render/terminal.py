"""The two consoles and the small shapes that every report is made of: numbers with units, bars, tables.

Knows no verb. Text from prompts and models must have been through `inferdbg.probes.text` before it comes here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["bar", "count", "diagnostics", "duration", "output", "share", "table"]

PLAIN_WIDTH = 120  # of lines that go to a file or a pipe
BAR_WIDTH = 30


def output() -> Console:
    """The console for data: stdout."""
    return _console(sys.stdout)


def diagnostics() -> Console:
    """The console for progress and warnings: stderr."""
    return _console(sys.stderr)


def _console(stream: IO[str]) -> Console:
    # Without a terminal rich would fold lines to 80 columns; $COLUMNS still wins.
    width = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


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
