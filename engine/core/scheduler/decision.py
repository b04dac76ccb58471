"""What one step will do, as a value that flows: made by the scheduler, read by all later stages, changed by none."""

from __future__ import annotations

from dataclasses import dataclass

from inferdbg.engine.core.events import WaitReason
from inferdbg.engine.core.sequence import Sequence

__all__ = ["Admission", "Preemption", "ScheduleDecision", "Waits"]


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that got a slot and pages."""

    seq_id: int
    num_cached: int  # tokens found in the prefix cache
    num_queried: int  # tokens looked up there; 0 where the cache is off or bypassed
    is_resume: bool  # it was preempted before


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that lost its pages to others and waits again."""

    seq_id: int
    num_lost: int  # computed tokens thrown away; some may be found in the prefix cache again


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDecision:
    """The step's chunks, in columns and in batch order: decodes, then prefill chunks. Pages are allocated already.

    Sequence i computes its positions [starts[i], starts[i] + lens[i]).
    """

    seqs: tuple[Sequence, ...] = ()
    starts: tuple[int, ...] = ()
    lens: tuple[int, ...] = ()
    num_decodes: int = 0  # of the first sequences
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    blocked_by: WaitReason | None = None  # what ended the admissions; None: nobody was left waiting


@dataclass(frozen=True, slots=True)
class Waits:
    """Who waits and why, in columns: one entry per reason that occurs."""

    reasons: tuple[WaitReason, ...]
    requests: tuple[int, ...]
    tokens: tuple[int, ...]  # still to be computed before their next output
    oldest_ns: int | None  # arrival of the oldest, those paused by their clients left out
