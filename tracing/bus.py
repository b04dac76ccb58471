"""The observer: takes events off the engine's hands and works on them in one background thread.

What answers clients (arrivals, ends) is never dropped: it is bounded by the requests admitted. Step records are
telemetry: past a bound they are dropped, counted, and a `Gap` stands in their place. Knows no handler's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inferdbg.engine.core.events import StepRecord
from inferdbg.engine.serving.events import Event
from inferdbg.tracing.losses import Losses

__all__ = ["Bus", "Gap", "Handler", "null_observer"]

_log = logging.getLogger(__name__)
_YIELD_NS = 500_000
_QUIET_CYCLES = 20  # to be woken costs the engine's front 50 µs: not for every step of a slow model
_IDLE_SECONDS = 1.0  # a disk that failed is tried again, a segment that is old is closed


@dataclass(slots=True)
class Gap:
    """Step records that were dropped at this place in the order of events."""

    num_steps: int


Handler = Callable[[Event | Gap], None]


def null_observer(event: Event) -> None:
    """Observes nothing: what an engine without instrumentation is given."""


class Bus:
    """An `Observer` that never blocks and never throws. Called from one thread, the front's event loop.

    Every `period_seconds` the background thread takes all that has queued up, gives each event to each handler, and
    calls `flush`; in a long burst it flushes in between too. So an event is flushed within one period and the time
    that handling one period's events takes. Between events it lets go of the GIL, for a burst not to hold a step back.
    After a second with nothing to do it sleeps for longer, and the next event wakes it.
    """

    def __init__(
        self,
        handlers: Sequence[Handler],
        flush: Callable[[], None],
        losses: Losses,
        *,
        period_seconds: float = 0.05,
        max_telemetry: int = 4096,
    ) -> None:
        self._handlers = tuple(handlers)
        self._flush = flush
        self._losses = losses
        self._period = period_seconds
        self._max_telemetry = max_telemetry
        self._queue: deque[Event | Gap] = deque()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._is_idle = False
        self._quiet_cycles = 0
        self._done = threading.Condition()
        self._cycles_asked = 0
        self._cycles_done = 0
        self._observe_ns = 0
        self._cpu_seconds = 0.0
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="inferdbg-record", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __call__(self, event: Event) -> None:
        began = time.perf_counter_ns()
        queue = self._queue
        if isinstance(event, StepRecord) and len(queue) >= self._max_telemetry:
            self._losses.add("steps")
            self._mark_gap()
        else:
            queue.append(event)
        if self._is_idle:
            self._wake.set()
        self._observe_ns += time.perf_counter_ns() - began

    def _mark_gap(self) -> None:
        try:
            last: Event | Gap | None = self._queue[-1]
        except IndexError:  # the background thread was quicker
            last = None
        if isinstance(last, Gap):
            last.num_steps += 1
        else:
            self._queue.append(Gap(1))

    def cpu_seconds(self) -> dict[str, float]:
        """CPU spent so far: `observe` in the caller's thread, `record` in the background."""
        return {"observe": self._observe_ns / 1e9, "record": self._cpu_seconds}

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Waits until all that was observed before this call is handled and flushed. False: timed out."""
        with self._done:
            self._cycles_asked += 1
            wanted = self._cycles_asked
            self._wake.set()
            return self._done.wait_for(
                lambda: self._cycles_done >= wanted or not self._thread.is_alive(), timeout_seconds
            )

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Handles what has queued up, then ends the thread."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            due = min(max(due + self._period, now), now + self._period)  # a fixed rate, whatever a cycle takes
            self._pause(due - now)
            closing = self._closing.is_set()
            asked = self._cycles_asked
            self._cycle()
            self._cpu_seconds = time.thread_time()
            with self._done:
                self._cycles_done = asked
                self._done.notify_all()
            if closing:
                return

    def _pause(self, seconds: float) -> None:
        """Until the next cycle is due, or someone waits for it; with nothing to do, until there is."""
        self._wake.wait(seconds)
        self._wake.clear()
        if self._queue or self._closing.is_set() or self._cycles_asked != self._cycles_done:
            self._quiet_cycles = 0
            return
        self._quiet_cycles += 1
        if self._quiet_cycles < _QUIET_CYCLES:
            return
        self._is_idle = True
        if not self._queue:  # looked at again: an event that came before the mark woke nobody
            self._wake.wait(_IDLE_SECONDS)
        self._is_idle = False
        self._wake.clear()

    def _cycle(self) -> None:
        queue = self._queue
        flushed = yielded = time.perf_counter_ns()
        for _ in range(len(queue)):
            event = queue.popleft()
            for handler in self._handlers:
                try:
                    handler(event)
                except Exception as error:
                    self._fail(error, type(event).__name__)
            if (now := time.perf_counter_ns()) - yielded > _YIELD_NS:
                time.sleep(0)
                yielded = now
            if now - flushed > self._period * 1e9:
                self._flush_once()
                flushed = now
        self._flush_once()

    def _flush_once(self) -> None:
        try:
            self._flush()
        except Exception as error:
            self._fail(error, "flush")

    def _fail(self, error: Exception, what: str) -> None:
        self._losses.add("events")
        if not self._complained:  # once: a fault of ours must not flood the log at the rate of steps
            self._complained = True
            _log.error("instrumentation failed on %s", what, exc_info=error)
