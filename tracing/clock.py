"""One moment on both clocks. All times in a run are ns of CLOCK_MONOTONIC; this is how they become dates."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["ClockPair"]


@dataclass(frozen=True, slots=True)
class ClockPair:
    """The same moment in ns since the Unix epoch and in ns of CLOCK_MONOTONIC."""

    wall_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> ClockPair:
        """Taken once, by the top process; children are handed the pair."""
        before = time.monotonic_ns()
        wall = time.time_ns()
        return cls(wall, (before + time.monotonic_ns()) // 2)

    def wall(self, monotonic_ns: int) -> int:
        """Unix ns of a monotonic time on this host."""
        return self.wall_ns + (monotonic_ns - self.monotonic_ns)
