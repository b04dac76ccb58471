"""What is in flight: requests between `Arrived` and `Closed`, and what the engine did to their sequences.

Knows no row, span or metric; those are made from it when a request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from inferdbg.engine.core.events import StepRecord
from inferdbg.engine.serving.events import Arrived, Closed

__all__ = ["Flight", "Flights", "Note", "NoteKind"]


class NoteKind(Enum):
    """What happened to a sequence besides computing."""

    CACHE_HIT = auto()
    PREEMPTED = auto()
    RESUMED = auto()


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that happened to one sequence in one step."""

    kind: NoteKind
    seq_id: int
    time_ns: int
    step: int
    tokens: int  # found in the cache, or thrown away


@dataclass(slots=True)
class Flight:
    """One request in flight."""

    arrived: Arrived
    incarnation: int
    steps_complete: bool = True
    notes: list[Note] = field(default_factory=list)


class Flights:
    """The requests in flight, by request id and by sequence. Used from one thread."""

    def __init__(self) -> None:
        self._requests: dict[str, Flight] = {}
        self._sequences: dict[int, Flight] = {}
        self.incarnation = 0

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, event: Arrived) -> Flight:
        flight = Flight(event, self.incarnation)
        self._requests[event.request_id] = flight
        for seq_id in event.seq_ids:
            self._sequences[seq_id] = flight
        return flight

    def close(self, event: Closed) -> Flight:
        """The flight of a request that ended; a bare one where its arrival was never seen."""
        flight = self._requests.pop(event.request_id, None) or Flight(event.arrived, self.incarnation)
        for seq_id in event.arrived.seq_ids:
            if self._sequences.get(seq_id) is flight:
                del self._sequences[seq_id]
        return flight

    def of_sequence(self, seq_id: int) -> Flight | None:
        return self._sequences.get(seq_id)

    def gap(self) -> None:
        """Step records were lost: what is in flight has an incomplete story."""
        for flight in self._requests.values():
            flight.steps_complete = False

    def step(self, record: StepRecord) -> None:
        """Notes preemptions and admissions with the requests they concern."""
        if record.preempted_seq_ids:
            for seq_id, lost in zip(record.preempted_seq_ids, record.preempted_lost, strict=True):
                self._note(NoteKind.PREEMPTED, seq_id, record, lost)
        if record.admitted_seq_ids:
            admissions = zip(record.admitted_seq_ids, record.admitted_cached, record.admitted_is_resume, strict=True)
            for seq_id, cached, is_resume in admissions:
                if is_resume:
                    self._note(NoteKind.RESUMED, seq_id, record, cached)
                elif cached:
                    self._note(NoteKind.CACHE_HIT, seq_id, record, cached)

    def _note(self, kind: NoteKind, seq_id: int, record: StepRecord, tokens: int) -> None:
        if (flight := self._sequences.get(seq_id)) is not None:
            flight.notes.append(Note(kind, seq_id, record.start_ns, record.step, tokens))
