"""The plain path: transformers' own modules, unchanged, over the paged KV. The oracle of every faster path.

Knows no sequence: a step arrives as one flattened row of tokens with its page tables.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from inferdbg.engine.core.model.attention import (
    ATTENTION_NAME,
    BatchAttention,
    PagedBatch,
    PrefillChunk,
    register_attention,
)
from inferdbg.engine.core.model.families import family_of
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.runner import StepBatch

__all__ = ["PlainForward"]


class PlainForward:
    """Runs a transformers model; the model's attention implementation is set to ours for good."""

    name = "plain"

    def __init__(self, model: PreTrainedModel, pool: KVPool) -> None:
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
        if pool.dtype == torch.float64 and family_of(model).experts:
            model.set_experts_implementation("eager")  # the grouped product, which is the default, knows no float64
        model.train(False)
        self.model = model
        self.pool = pool

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """See `Forward`."""
        device = self.pool.device
        with torch.inference_mode():
            return self.compute(
                torch.from_numpy(batch.token_ids).to(device),
                torch.from_numpy(batch.positions).to(device),
                torch.from_numpy(batch.logits_rows).to(device),
                self._paged(batch),
            )

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, paged: BatchAttention
    ) -> torch.Tensor:
        """Logits (R, vocab) of `rows` (R,) of the T tokens; `token_ids` and `positions` are (T,), on the device."""
        output = self.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            paged=paged,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _paged(self, batch: StepBatch) -> PagedBatch:
        pool, device = self.pool, self.pool.device
        starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        tables = torch.from_numpy(batch.page_tables)
        num = batch.num_decodes
        width = -(-max(lens[:num], default=0) // pool.page_size)
        chunks = tuple(
            PrefillChunk(
                starts[s],
                starts[s + 1],
                lens[s],
                pool.page_rows(tables[s : s + 1, : -(-lens[s] // pool.page_size)]).to(device),
            )
            for s in range(num, len(lens))
        )
        return PagedBatch(
            pool,
            torch.from_numpy(batch.slots).to(device),
            tables[:num, :width].to(device),
            torch.from_numpy(batch.context_lens[:num]).to(device),
            chunks,
        )
