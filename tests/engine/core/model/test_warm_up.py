"""Warming up stays within the pages there are. (That it leaves no trace, every test of an engine shows.)"""

from __future__ import annotations

import pytest

from inferdbg.engine.core.model.warm_up import warm_up
from inferdbg.engine.core.runner import SampledTokens, SampleRow, ScoreRow, StepBatch


class BatchKeeper:
    """A runner that computes nothing and keeps what it was asked."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def execute(self, batch: StepBatch) -> int | None:
        self.batches.append(batch)
        return None

    def sample(self, rows: list[SampleRow], scores: list[ScoreRow], top_k: int) -> SampledTokens:
        return SampledTokens(token_ids=(0,), logprobs=(0.0,), top_k=1, top_ids=(0,), top_logprobs=(0.0,))


@pytest.mark.parametrize(
    ("num_pages", "page_size", "max_model_len", "tokens"),
    [(1, 1, 1, 1), (3, 16, 48, 48), (500, 16, 8, 8), (9, 64, 512, 64)],
)
def test_a_prefill_and_a_decode_fit(num_pages: int, page_size: int, max_model_len: int, tokens: int) -> None:
    runner = BatchKeeper()
    warm_up(runner, num_pages, page_size, max_model_len)
    prefill, last = runner.batches
    assert prefill.slots.tolist() == list(range(tokens))
    assert (prefill.num_decodes, prefill.logits_rows.tolist()) == (0, [tokens - 1])
    assert last.positions.tolist() == [tokens - 1]
    assert last.num_decodes == int(tokens > 1)
    assert last.page_tables.max() < num_pages
    assert last.page_tables.shape[1] * page_size >= tokens
