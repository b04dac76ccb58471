"""Turns events into the rows and spans of a run. Knows neither threads nor how a row or a span is encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from inferdbg.engine.core.events import StepFailed, StepRecord
from inferdbg.engine.serving.events import (
    Arrived,
    Closed,
    CoreStarted,
    EngineLost,
    Event,
    Rejected,
)  # fmt: skip
from inferdbg.tracing.bus import Gap
from inferdbg.tracing.flights import Flight, Flights
from inferdbg.tracing.losses import Losses
from inferdbg.tracing.rows import Row, RowContext, arrival_row, rejected_row, request_rows, step_row, to_batch
from inferdbg.tracing.schema import TABLES
from inferdbg.tracing.segments import TableWriter

__all__ = ["Recorder", "SpanMaker", "Tables"]

_log = logging.getLogger(__name__)

UNAUTHENTICATED = 401
REFUSALS_PER_SECOND = 10  # rows and spans of requests without a valid key

_KEEP_BYTES = {"arrivals": 16 << 20, "requests": 64 << 20, "steps": 0}


class SpanMaker(Protocol):
    """Makes spans of what ended."""

    def request(self, event: Closed, flight: Flight) -> None: ...
    def rejected(self, event: Rejected) -> None: ...
    def step(self, record: StepRecord, flights: Flights) -> None: ...
    def set_incarnation(self, incarnation: int) -> None: ...
    def flush(self) -> None: ...


@dataclass(slots=True)
class _Pending:
    row: Row
    flight: Flight | None = None


class Tables:
    """The three tables of one writer. Rows wait here from one flush to the next."""

    def __init__(self, run_dir: Path, replica: str, losses: Losses, on_closed: Callable[[Path], None]) -> None:
        self._losses = losses
        self._pending: dict[str, list[_Pending]] = {name: [] for name in TABLES}
        self._writers = {
            name: TableWriter(run_dir / name, schema, replica, keep_bytes=_KEEP_BYTES[name], on_closed=on_closed)
            for name, schema in TABLES.items()
        }

    def add(self, table: str, row: Row, flight: Flight | None = None) -> None:
        """`flight` of a request's row: its `steps_complete` is read when the row is written."""
        self._pending[table].append(_Pending(row, flight))

    def flush(self, flights: Flights) -> None:
        """Arrivals first, then steps: a request's row must know whether its steps could be written."""
        self._write("arrivals")
        closed = {id(p.flight): p.flight for p in self._pending["requests"] if p.flight is not None}
        if self._write("steps"):
            flights.gap()
            for flight in closed.values():
                flight.steps_complete = False
        self._write("requests")

    def set_incarnation(self, incarnation: int) -> None:
        for writer in self._writers.values():
            writer.set_incarnation(incarnation)

    def close(self) -> None:
        for name, writer in self._writers.items():
            self._losses.add(name, writer.close())

    def _write(self, table: str) -> int:
        pending, self._pending[table] = self._pending[table], []
        writer = self._writers[table]
        if not pending:
            lost = writer.pump()
        else:
            for entry in pending:
                if entry.flight is not None:
                    entry.row["steps_complete"] = entry.flight.steps_complete
            lost = self._write_rows(writer, [entry.row for entry in pending], TABLES[table])
        self._losses.add(table, lost)
        return lost

    def _write_rows(self, writer: TableWriter, rows: list[Row], schema: Any) -> int:
        try:
            return writer.write(to_batch(rows, schema))
        except Exception as error:  # a row that is not what the contract says must not take the others with it
            _log.error("a row is not as it should be: %s", type(error).__name__)
        lost = 0
        for row in rows:
            try:
                lost += writer.write(to_batch([row], schema))
            except Exception:
                lost += 1
        return lost


class RateLimit:
    """Lets so many through in each second of the events' own clock."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second = -1
        self._taken = 0

    def takes(self, time_ns: int) -> bool:
        second = time_ns // 1_000_000_000
        if second > self._second:
            self._second, self._taken = second, 0
        self._taken += 1
        return self._taken <= self._per_second


class Recorder:
    """A `bus.Handler`: keeps what is in flight, adds rows and spans when things end.

    Args:
        tables: None: no run directory.
        spans: None: no spans.
        on_core: told of each core that started or was lost, for the manifest.
    """

    def __init__(
        self,
        context: RowContext,
        *,
        tables: Tables | None,
        spans: SpanMaker | None,
        on_core: Callable[[CoreStarted | EngineLost], None],
        losses: Losses,
    ) -> None:
        self._context = context
        self._losses = losses
        self._refusals = RateLimit(REFUSALS_PER_SECOND)
        self._tables = tables
        self._spans = spans
        self._on_core = on_core
        self.flights = Flights()

    def __call__(self, event: Event | Gap) -> None:
        match event:
            case StepRecord():
                self.flights.step(event)
                self._step(event)
                if self._spans is not None:
                    self._spans.step(event, self.flights)
            case Arrived():
                self._context.tokens.arrived(event)
                self.flights.open(event)
                if self._tables is not None:
                    self._tables.add("arrivals", arrival_row(event, self._context))
            case Closed():
                self._closed(event)
            case Rejected():
                self._rejected(event)
            case StepFailed():
                self._step(event)
            case CoreStarted():
                self._set_incarnation(event.incarnation)
                self._on_core(event)
            case EngineLost():
                self._on_core(event)
            case Gap():
                self.flights.gap()
                self._context.tokens.gap()

    def flush(self) -> None:
        if self._tables is not None:
            self._tables.flush(self.flights)
        if self._spans is not None:
            self._spans.flush()

    def _closed(self, event: Closed) -> None:
        flight = self.flights.close(event)
        context = replace(self._context, incarnation=flight.incarnation)
        if self._tables is not None:
            for row in request_rows(event, context, steps_complete=flight.steps_complete):
                self._tables.add("requests", row, flight)
        if self._spans is not None:
            self._spans.request(event, flight)
        self._context.tokens.closed(event.arrived.seq_ids)

    def _rejected(self, event: Rejected) -> None:
        # anybody can send these, without a key, as fast as the network carries them
        if event.status == UNAUTHENTICATED and not self._refusals.takes(event.closed_ns):
            self._losses.add("refusals")
            return
        if self._tables is not None:
            self._tables.add("requests", rejected_row(event, self._context))
        if self._spans is not None:
            self._spans.rejected(event)

    def _set_incarnation(self, incarnation: int) -> None:
        if self._tables is not None:
            self._tables.flush(self.flights)
            self._tables.set_incarnation(incarnation)
        if self._spans is not None:
            self._spans.set_incarnation(incarnation)
        self.flights.incarnation = incarnation
        self._context = replace(self._context, incarnation=incarnation)

    def _step(self, event: StepRecord | StepFailed) -> None:
        if self._tables is not None:
            self._tables.add("steps", step_row(event, self._context))
