"""What one step of the fast path computes, worked out once for all layers. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inferdbg.engine.core.runner import IntArray, StepBatch

__all__ = ["Chunk", "StepPlan"]


@dataclass(slots=True)
class Chunk:
    """A prefill chunk: rows [start, end) of the step are the last ones of `context_len` tokens."""

    start: int
    end: int
    context_len: int
    pages: Tensor  # (P,) the pages of the context
    masks: dict[int, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int) -> Tensor | None:
        """(rows, context) of bool: who sees whom. None: plain causal, without context before the chunk."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def _make_mask(self, window: int) -> Tensor | None:
        rows = self.end - self.start
        hides = 0 < window < self.context_len
        if rows == self.context_len and not hides:
            return None
        query = torch.arange(self.context_len - rows, self.context_len)[:, None]
        key = torch.arange(self.context_len)[None]
        seen = key <= query
        return seen & (key > query - window) if hides else seen


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The columns of a `StepBatch` that the kernels read; decodes come first."""

    positions: IntArray  # (T,)
    slots: IntArray  # (T,)
    num_decodes: int
    context_lens: IntArray  # (decodes,)
    page_tables: IntArray  # (decodes, pages)
    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(batch: StepBatch, page_size: int) -> StepPlan:
        decodes = batch.num_decodes
        starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        chunks = []
        for seq in range(decodes, len(lens)):
            pages = batch.page_tables[seq, : -(-lens[seq] // page_size)]
            chunks.append(Chunk(starts[seq], starts[seq + 1], lens[seq], torch.from_numpy(pages)))
        context_lens = batch.context_lens[:decodes]
        num_pages = -(-int(context_lens.max()) // page_size) if decodes else 0
        return StepPlan(
            positions=np.ascontiguousarray(batch.positions),
            slots=np.ascontiguousarray(batch.slots),
            num_decodes=decodes,
            context_lens=np.ascontiguousarray(context_lens),
            page_tables=np.ascontiguousarray(batch.page_tables[:decodes, :num_pages]),
            chunks=tuple(chunks),
        )
