"""Who waits for the engine, as far as events tell: also what its scheduler has not seen yet.

A step's record says who waited when it ended. While the core is busy or stalls no record comes, and what arrived since
then is in none: that is counted here. Knows no metric.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from inferdbg.engine.core.events import StepRecord, WaitReason
from inferdbg.engine.serving.events import Arrived

__all__ = ["UNSEEN", "Unseen", "WaitingLine"]

UNSEEN = "unseen"
"""The reason of a sequence that was accepted and that no step's record covers yet."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """What the last step's record does not cover, and since when the longest-waiting sequence of all waits."""

    num_sequences: int
    num_tokens: int
    oldest_ns: int | None  # first byte of the oldest sequence not admitted yet, seen or not


@dataclass(frozen=True, slots=True)
class _Sequence:
    arrived_ns: int
    num_tokens: int


class WaitingLine:
    """Sequences from arrival to first admission, in order of arrival. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: dict[int, _Sequence] = {}
        self._preempted: set[int] = set()
        self._num_seen = 0  # of the line, by the last step's scheduler

    def arrive(self, event: Arrived) -> None:
        num_choices = max(1, len(event.seq_ids) // max(1, len(event.prompts)))
        with self._lock:
            for position, seq_id in enumerate(event.seq_ids):
                num_tokens = len(event.prompts[min(position // num_choices, len(event.prompts) - 1)])
                self._line[seq_id] = _Sequence(event.time_ns, num_tokens)

    def leave(self, seq_ids: Iterable[int]) -> None:
        """Their request was closed."""
        with self._lock:
            self._remove(seq_ids)

    def step(self, record: StepRecord) -> None:
        """What was admitted, computed or ended waits no more: the record of its admission may have been dropped."""
        with self._lock:
            self._preempted.update(record.preempted_seq_ids)
            if self._line or self._preempted:
                for gone in (record.admitted_seq_ids, record.chunk_seq_ids, record.finished_seq_ids):
                    self._remove(gone)
            waiting = sum(
                number
                for reason, number in zip(record.waiting_reasons, record.waiting_requests, strict=True)
                if reason != WaitReason.CREDIT  # paused: it was admitted long ago
            )
            self._num_seen = max(0, waiting - len(self._preempted))

    def reset(self) -> None:
        """The core is another, or gone: its scheduler has seen nothing."""
        with self._lock:
            self._preempted.clear()
            self._num_seen = 0

    def unseen(self) -> Unseen:
        """The scheduler sees sequences in order of arrival: what it has not seen are the last of the line."""
        with self._lock:
            line = list(self._line.values())
            seen = min(self._num_seen, len(line))
        return Unseen(
            num_sequences=len(line) - seen,
            num_tokens=sum(sequence.num_tokens for sequence in line[seen:]),
            oldest_ns=min((sequence.arrived_ns for sequence in line), default=None),
        )

    def _remove(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._line.pop(seq_id, None)
            self._preempted.discard(seq_id)
