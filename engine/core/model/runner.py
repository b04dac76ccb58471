"""Executes and samples the steps of an `Engine` on a real model. Knows no sequence and no page's owner."""

from __future__ import annotations

import torch

from inferdbg.engine.core.model.decode_graph import DecodeGraphs
from inferdbg.engine.core.model.forward import Forward
from inferdbg.engine.core.runner import SampledTokens, SampleRow, ScoreRow, StepBatch
from inferdbg.engine.core.sampler.sampler import Sampler

__all__ = ["ModelRunner"]


class ModelRunner:
    """A `Runner`: steps of decodes alone go through `graphs` where there are any, all others through `forward`."""

    def __init__(self, forward: Forward, sampler: Sampler, graphs: DecodeGraphs | None = None) -> None:
        self._forward = forward
        self._sampler = sampler
        self._graphs = graphs
        self._logits: torch.Tensor | None = None  # of the last execute, (R, vocab)

    def execute(self, batch: StepBatch) -> int | None:
        """See `Runner`."""
        self._logits = None
        if self._graphs is not None and (bucket := self._graphs.bucket_of(batch)) is not None:
            self._logits = self._graphs.logits(batch, bucket)
            return bucket
        self._logits = self._forward.logits(batch)
        return None

    def sample(self, rows: list[SampleRow], scores: list[ScoreRow], top_k: int) -> SampledTokens:
        """See `Runner`."""
        assert self._logits is not None, "sample follows execute"
        return self._sampler.sample(self._logits, rows, scores, top_k)
