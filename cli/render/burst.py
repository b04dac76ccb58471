"""Shows requests while they are answered: a live table on a terminal; elsewhere a line when more of them are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inferdbg.cli.museum.burst import MAX_TOKENS, Progress
from inferdbg.cli.render.terminal import bar, duration
from inferdbg.probes.text import printable

__all__ = ["BurstView"]

PLAIN_SECONDS = 5.0  # between two lines, at least
LAST_WORDS = 50
BAR_WIDTH = 16


class BurstView:
    """A context manager; call `update` as often as you like. `clock` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._progress: Sequence[Progress] = ()
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=8, transient=True)
        self._last_line = clock()
        self._num_told = 0

    def __enter__(self) -> BurstView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        if error is None:
            self._console.print(Text(self._sum()))

    def update(self, progress: Sequence[Progress]) -> None:
        self._progress = progress
        if self._console.is_terminal:
            return
        num_ended = sum(state.done_seconds is not None or state.error is not None for state in progress)
        now = self._clock()
        # the last line is printed at the end
        if self._num_told < num_ended < len(progress) and now - self._last_line >= PLAIN_SECONDS:
            self._last_line, self._num_told = now, num_ended
            self._console.print(Text(self._sum()))

    def _sum(self) -> str:
        done = [state for state in self._progress if state.done_seconds is not None]
        failed = sum(state.error is not None for state in self._progress)
        firsts = sorted(s.first_text_seconds for s in self._progress if s.first_text_seconds is not None)
        parts = [f"  {len(done)} of {len(self._progress)} answered"]
        if firsts:
            parts.append(f"first words after {duration(firsts[0])} to {duration(firsts[-1])}")
        if len(done) == len(self._progress) and done:
            parts.append(f"all of it after {duration(max(s.done_seconds or 0.0 for s in done))}")
        if failed:
            parts.append(f"{failed} failed ({', '.join(sorted({s.error for s in self._progress if s.error}))})")
        return ", ".join(parts)

    def _table(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for _ in range(4):
            grid.add_column(no_wrap=True, overflow="ellipsis")
        for state in self._progress:
            if state.error is not None:
                mark, told = Text("✗", style="red"), Text(state.error, style="red")
            elif state.done_seconds is not None:
                mark, told = Text("✓", style="green"), Text(printable(state.text[-LAST_WORDS:]), style="dim")
            else:
                mark, told = Text("·"), Text(printable(state.text[-LAST_WORDS:]))
            grid.add_row(mark, Text(state.slug), bar(state.num_chunks, MAX_TOKENS, BAR_WIDTH), told)
        return grid
