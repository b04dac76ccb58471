"""Times the stages of one step, and knows which one is running. Knows not what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["StageTimes"]

P = ParamSpec("P")
T = TypeVar("T")


class StageTimes:
    """Stages run one after another without gaps: one ends where the next starts. Times in ns."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.times: dict[str, int] = {}
        self.current = ""
        self.start_ns = clock()
        self._clock = clock
        self._last_ns = self.start_ns

    def run(self, name: str, stage: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.current = name
        result = stage(*args, **kwargs)
        self.times[name] = self.elapsed()
        self._last_ns += self.times[name]
        return result

    def elapsed(self) -> int:
        """Time in the stage that is running."""
        return self._clock() - self._last_ns
