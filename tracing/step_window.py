"""The time during which engine steps become spans. Opened by the command line or an administrative route."""

from __future__ import annotations

import time
from collections.abc import Callable

from inferdbg.engine.errors import InvalidRequest

__all__ = ["MAX_WINDOW_SECONDS", "StepWindow"]

MAX_WINDOW_SECONDS = 3600.0


class StepWindow:
    """Open until a moment on the monotonic clock. Thread-safe: one integer is all its state."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._until_ns = 0

    def open(self, seconds: float) -> int:
        """Opens (or keeps open) the window from now on; returns when it closes, in monotonic ns.

        Raises:
            InvalidRequest: not between 0 (close now) and `MAX_WINDOW_SECONDS`.
        """
        if not 0 <= seconds <= MAX_WINDOW_SECONDS:
            raise InvalidRequest(f"seconds must lie between 0 and {MAX_WINDOW_SECONDS:g}, {seconds:g} given", "seconds")
        self._until_ns = self._clock() + int(seconds * 1e9)
        return self._until_ns

    def covers(self, time_ns: int) -> bool:
        return time_ns < self._until_ns
