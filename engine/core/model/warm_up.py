"""One prefill and one decode before the first client comes: what libraries set up lazily is set up by then.

Only for an engine that has run nothing: it writes to pages that nobody holds yet.
"""

from __future__ import annotations

import numpy as np

from inferdbg.engine.core.runner import Runner, SampleRow, StepBatch
from inferdbg.engine.core.sampling_params import SamplingParams

__all__ = ["warm_up"]

PREFILL_TOKENS = 64


def warm_up(runner: Runner, num_pages: int, page_size: int, max_model_len: int) -> None:
    """Computes a short prompt and its first token in the first pages, and throws both away."""
    length = min(PREFILL_TOKENS, num_pages * page_size, max_model_len)
    for start, end in ((0, length), (length - 1, length)):
        runner.execute(_batch(start, end, page_size))
        row = SampleRow(
            logits_row=0,
            seq_id=0,
            params=SamplingParams(temperature=0.0),
            seed=0,
            choice_index=0,
            output_index=0,
            prompt_ids=(),
            output_ids=(),
        )
        runner.sample([row], [], 1)


def _batch(start: int, end: int, page_size: int) -> StepBatch:
    """Positions [start, end) of one sequence whose pages are 0, 1, 2, …"""
    positions = np.arange(start, end, dtype=np.int64)
    return StepBatch(
        token_ids=np.zeros(end - start, dtype=np.int64),
        positions=positions,
        slots=positions,
        query_starts=np.array([0, end - start], dtype=np.int64),
        context_lens=np.array([end], dtype=np.int64),
        page_tables=np.arange(-(-end // page_size), dtype=np.int64)[None],
        logits_rows=np.array([end - start - 1], dtype=np.int64),
        num_decodes=int(start > 0),
    )
