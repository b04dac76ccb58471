"""First come, first served."""

from __future__ import annotations

from inferdbg.engine.core.sequence import Sequence

__all__ = ["Fcfs"]


class Fcfs:
    """By arrival; sequences of one request, which arrive together, by id."""

    def rank(self, seq: Sequence) -> tuple[int, int]:
        return (seq.request.arrival_ns, seq.seq_id)
