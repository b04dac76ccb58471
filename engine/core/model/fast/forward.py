"""One step of a decoder: the order of its products and kernels. Knows no sequence, and not how they are computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inferdbg.engine.core.model.fast.kernels import Kernels
from inferdbg.engine.core.model.fast.plan import StepPlan
from inferdbg.engine.core.model.fast.weights import Decoder
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.runner import StepBatch

__all__ = ["FastForward"]


class FastForward:
    """A `Forward` for a `Decoder`."""

    def __init__(self, decoder: Decoder, pool: KVPool, kernels: Kernels) -> None:
        self.decoder = decoder
        self.pool = pool
        self.kernels = kernels

    @property
    def name(self) -> str:
        return f"fast-{self.kernels.name}"

    @torch.inference_mode()
    def logits(self, batch: StepBatch) -> Tensor:
        decoder, kernels = self.decoder, self.kernels
        plan = StepPlan.of(batch, self.pool.page_size)
        rows = torch.from_numpy(batch.logits_rows)
        last = len(decoder.layers) - 1
        residual = F.embedding(torch.from_numpy(batch.token_ids), decoder.embedding)  # (T, H)
        x = kernels.norm(residual, decoder.layers[0].input_norm)
        for index, layer in enumerate(decoder.layers):
            qkv = kernels.multiply(layer.qkv, x)
            kernels.rotate_and_store(qkv, index, plan)
            if index == last and not len(rows):  # a chunk before a prompt's last one: its K and V are all it is for
                return qkv.new_empty(0, decoder.embedding.shape[0])
            attended = self._attend(qkv, index, plan)
            if index == last:  # what follows is wanted for the rows of the logits only
                attended, residual = attended[rows], residual[rows]
            x = kernels.add_norm(residual, kernels.multiply(layer.output, attended), layer.post_norm)
            x = kernels.multiply(layer.down, kernels.gate(kernels.multiply(layer.gate_up, x)))
            norm = decoder.final_norm if index == last else decoder.layers[index + 1].input_norm
            x = kernels.add_norm(residual, x, norm)
        return kernels.multiply(decoder.head, x)

    def _attend(self, qkv: Tensor, index: int, plan: StepPlan) -> Tensor:
        """Attention of every row, by kernel for decodes and chunk by chunk for prefill: (T, Hq * D)."""
        width = self.decoder.num_heads * self.decoder.head_dim
        attended = qkv.new_empty(qkv.shape[0], width)
        if plan.num_decodes:
            self.kernels.attend(qkv, index, plan, attended)
        for chunk in plan.chunks:
            self.kernels.attend_chunk(qkv, index, chunk, attended)
        return attended
