"""What kind of work a step did: one definition for metrics, spans and readers."""

from __future__ import annotations

from inferdbg.engine.core.events import StepRecord

__all__ = ["STEP_KINDS", "step_kind", "step_tokens"]

STEP_KINDS = ("prefill", "decode", "mixed", "empty")


def step_tokens(record: StepRecord) -> tuple[int, int]:
    """Tokens computed in prefill chunks and in decode chunks."""
    prefill = sum(n for n, is_prefill in zip(record.chunk_lens, record.chunk_is_prefill, strict=True) if is_prefill)
    return prefill, sum(record.chunk_lens) - prefill


def step_kind(record: StepRecord) -> str:
    """One of `STEP_KINDS`; empty: the step computed nothing (it only ended or refused sequences)."""
    prefill, decode = step_tokens(record)
    match prefill > 0, decode > 0:
        case True, True:
            return "mixed"
        case True, False:
            return "prefill"
        case False, True:
            return "decode"
        case _:
            return "empty"
