"""Counts what was lost on the way to the record. Knows no reason and no remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["SIGNALS", "Losses"]

SIGNALS = ("steps", "spans", "otlp_spans", "requests", "arrivals", "refusals", "events")
"""steps, spans: telemetry dropped under pressure or by the disk; otlp_spans: not taken by the collector;
requests, arrivals: rows the disk did not take; refusals: requests without a valid key, beyond what is written of them
each second; events: an event our own code could not digest."""


class Losses:
    """Lost items by signal. Thread-safe."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(SIGNALS, 0)
        self._elsewhere: list[tuple[str, Callable[[], int]]] = []
        self._lock = threading.Lock()

    def add(self, signal: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[signal] += count

    def watch(self, signal: str, count: Callable[[], int]) -> None:
        """Adds what is counted elsewhere: `count` is asked whenever the counts are, on any thread."""
        self._elsewhere.append((signal, count))

    def counts(self) -> dict[str, int]:
        """All signals, zeros included."""
        with self._lock:
            counts = dict(self._counts)
        for signal, count in self._elsewhere:
            counts[signal] += count()
        return counts
