"""Gathers the log-probabilities of prompt tokens, which come chunk by chunk, until the prefill is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferdbg.engine.core.events import PromptScores
from inferdbg.engine.core.runner import ScoreRow

__all__ = ["ScoreBook"]


@dataclass(slots=True)
class _Columns:
    k: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


class ScoreBook:
    """Scores so far, by sequence."""

    def __init__(self) -> None:
        self._open: dict[int, _Columns] = {}

    def add(self, row: ScoreRow, scored: tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]]) -> None:
        """Appends one chunk's scores: logprobs (m,), top ids (m * k,), top logprobs (m * k,)."""
        columns = self._open.setdefault(row.seq_id, _Columns())
        columns.k = len(scored[1]) // len(scored[0])
        columns.logprobs += scored[0]
        columns.top_ids += scored[1]
        columns.top_logprobs += scored[2]

    def drop(self, seq_id: int) -> None:
        """Forgets a sequence that ended, or whose prefill starts over."""
        self._open.pop(seq_id, None)

    def take(self, seq_id: int) -> PromptScores:
        """All of a sequence's scores, which are then forgotten here. A prompt of one token has none."""
        columns = self._open.pop(seq_id, _Columns())
        return PromptScores(
            seq_id=seq_id,
            logprobs=tuple(columns.logprobs),
            k=columns.k,
            top_ids=tuple(columns.top_ids),
            top_logprobs=tuple(columns.top_logprobs),
        )
