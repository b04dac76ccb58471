"""Sends spans where they belong: everything to the run's own file, what the rule takes to the collector.

Knows which spans are wanted; the builder knows how they look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan

from inferdbg.engine.core.events import StepRecord
from inferdbg.engine.serving.events import Closed, EndKind, Rejected
from inferdbg.tracing.flights import Flight, Flights
from inferdbg.tracing.sampling import SampleRule
from inferdbg.tracing.span_file import SpanFile
from inferdbg.tracing.spans import SpanBuilder
from inferdbg.tracing.step_window import StepWindow

__all__ = ["SpanRouter"]


class SpanRouter:
    """A `recorder.SpanMaker`: everything to the run's own file, what the rule takes to the collector.

    Args:
        file: the run's span log; None: no run directory.
        ship: queues spans for the collector; None: no collector.
        always_steps: step spans whether or not the window is open.
    """

    def __init__(
        self,
        builder: SpanBuilder,
        window: StepWindow,
        rule: SampleRule,
        *,
        file: SpanFile | None,
        ship: Callable[[Sequence[ReadableSpan]], None] | None,
        always_steps: bool = False,
    ) -> None:
        self._builder = builder
        self._window = window
        self._rule = rule
        self._file = file
        self._ship = ship
        self._always_steps = always_steps
        self._unwritten: list[ReadableSpan] = []

    def request(self, event: Closed, flight: Flight) -> None:
        seconds = max(0, event.closed_ns - event.boundaries.received_ns) / 1e9
        taken = self._rule.takes(event.arrived.trace, is_error=event.end is not EndKind.FINISHED, seconds=seconds)
        self._route(lambda: self._builder.request(event, flight), taken)

    def rejected(self, event: Rejected) -> None:
        seconds = max(0, event.closed_ns - event.time_ns) / 1e9
        taken = self._rule.takes(event.trace, is_error=True, seconds=seconds)
        self._route(lambda: self._builder.rejected(event), taken)

    def step(self, record: StepRecord, flights: Flights) -> None:
        if not (self._always_steps or self._window.covers(record.start_ns)):
            return
        found = (flights.of_sequence(seq_id) for seq_id in record.chunk_seq_ids)
        linked = {id(flight): flight for flight in found if flight is not None}
        self._route(lambda: self._builder.step(record, list(linked.values())), True)

    def set_incarnation(self, incarnation: int) -> None:
        self.flush()
        if self._file is not None:
            self._file.set_incarnation(incarnation)

    def flush(self) -> None:
        if self._file is not None and self._unwritten:
            spans, self._unwritten = self._unwritten, []
            self._file.write(spans)

    def _route(self, build: Callable[[], list[ReadableSpan]], taken: bool) -> None:
        ship = self._ship if taken else None
        if self._file is None and ship is None:
            return
        spans = build()
        if self._file is not None:
            self._unwritten += spans
        if ship is not None:
            ship(spans)
