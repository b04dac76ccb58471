"""The line of sequences that want to be admitted. Knows their order, not what keeps them."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

from inferdbg.engine.core.scheduler.policy import Policy
from inferdbg.engine.core.sequence import Sequence, SequenceState

__all__ = ["WaitingLine"]


class WaitingLine:
    """Preempted sequences first, then by the policy's rank. Totals are kept, not counted anew at every step."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._line: list[Sequence] = []
        self._ids: set[int] = set()
        self._arrivals: list[tuple[int, int]] = []  # heap of (arrival_ns, seq_id); those gone are dropped when met
        self.num_tokens = 0  # to be computed before the next outputs of all in line

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._ids

    def add(self, seq: Sequence) -> None:
        insort(self._line, seq, key=self._key)
        self._ids.add(seq.seq_id)
        heappush(self._arrivals, (seq.request.arrival_ns, seq.seq_id))
        self.num_tokens += seq.num_to_compute

    def head(self) -> Sequence | None:
        return self._line[0] if self._line else None

    def remove(self, seq: Sequence) -> None:
        """Takes `seq`, which is in line and has no pages, out of it."""
        index = bisect_left(self._line, self._key(seq), key=self._key)
        assert self._line[index] is seq
        del self._line[index]
        self._ids.remove(seq.seq_id)
        self.num_tokens -= len(seq.token_ids)

    def oldest_ns(self) -> int | None:
        """Arrival of the sequence in line that arrived first."""
        while self._arrivals and self._arrivals[0][1] not in self._ids:
            heappop(self._arrivals)
        return self._arrivals[0][0] if self._arrivals else None

    def _key(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.state is not SequenceState.PREEMPTED, *self._policy.rank(seq))
