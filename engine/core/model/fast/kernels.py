"""The small operations between the products: norms, rope, the gate, attention of decodes. Here as torch operations;
`numba_kernels` has them compiled. Neither knows the order in which they are used.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inferdbg.engine.core.model.fast.chunk import query_key_value
from inferdbg.engine.core.model.fast.plan import Chunk, StepPlan
from inferdbg.engine.core.model.fast.products import Product
from inferdbg.engine.core.model.fast.weights import Decoder
from inferdbg.engine.core.model.kv_pool import KVPool

__all__ = ["Kernels", "TorchKernels", "choose_kernels"]


class Kernels(Protocol):
    """Operations on rows of tokens (T, …) in the model's dtype; sums are taken in float32."""

    @property
    def name(self) -> str: ...

    def multiply(self, product: Product, x: Tensor) -> Tensor:
        """`product` of each row."""
        ...

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of each row."""
        ...

    def add_norm(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Adds `x` to `residual` in place, returns the RMSNorm of the sum."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """(T, 2 F) -> (T, F): SiLU of the first half times the second."""
        ...

    def rotate_and_store(self, qkv: Tensor, layer: int, plan: StepPlan) -> None:
        """Norms (if the model does so) and rotates Q and K of `qkv` in place, writes K and V to their slots."""
        ...

    def attend(self, qkv: Tensor, layer: int, plan: StepPlan, out: Tensor) -> None:
        """Attention of the decodes over their pages, into the first rows of `out` (T, Hq * D)."""
        ...

    def attend_chunk(self, qkv: Tensor, layer: int, chunk: Chunk, out: Tensor) -> None:
        """Attention of a prefill chunk, into its rows of `out`."""
        ...


def choose_kernels(decoder: Decoder, pool: KVPool) -> Kernels:
    """The fastest kernels that this machine and its libraries have."""
    if decoder.embedding.dtype == torch.bfloat16:
        try:
            from inferdbg.engine.core.model.fast.numba_kernels import NumbaKernels, openmp_is_loaded
        except ImportError:  # numba comes with the extra `fast`
            return TorchKernels(decoder, pool)
        if openmp_is_loaded():
            return NumbaKernels(decoder, pool)
    return TorchKernels(decoder, pool)


class TorchKernels:
    """`Kernels` out of torch operations: slower, needs nothing else, and the reference of the compiled ones."""

    name = "torch"

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self.decoder = decoder
        self.pool = pool

    def multiply(self, product: Product, x: Tensor) -> Tensor:
        return product(x)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.decoder.eps)

    def add_norm(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self.norm(residual.add_(x), weight)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate_and_store(self, qkv: Tensor, layer: int, plan: StepPlan) -> None:
        decoder, pool, weights = self.decoder, self.pool, self.decoder.layers[layer]
        heads = qkv.view(qkv.shape[0], -1, decoder.head_dim)  # (T, Hq + 2 Hkv, D)
        query, key, value = torch.split(heads, [decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads], dim=1)
        positions = torch.from_numpy(plan.positions)
        cos, sin = decoder.cos[positions][:, None], decoder.sin[positions][:, None]  # (T, 1, D / 2)
        for part, weight in ((query, weights.query_norm), (key, weights.key_norm)):
            normed = part if weight is None else self.norm(part, weight)
            first, second = normed.float().chunk(2, dim=-1)
            part.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        slots = torch.from_numpy(plan.slots)
        pages, offsets = slots // pool.page_size, slots % pool.page_size
        pool.keys[layer][pages, :, offsets] = key
        pool.values[layer][pages, :, offsets] = value

    def attend(self, qkv: Tensor, layer: int, plan: StepPlan, out: Tensor) -> None:
        decoder, window = self.decoder, self.decoder.layers[layer].window
        count, kv_heads, dim = plan.num_decodes, decoder.num_kv_heads, decoder.head_dim
        pages = torch.from_numpy(plan.page_tables)
        length = pages.shape[1] * self.pool.page_size
        key, value = (
            kv[pages].transpose(1, 2).reshape(count, kv_heads, length, dim)
            for kv in (self.pool.keys[layer], self.pool.values[layer])
        )
        query = qkv[:count, : decoder.num_heads * dim].reshape(count, kv_heads, -1, dim)
        scores = torch.matmul(query, key.transpose(2, 3)).float() * dim**-0.5  # (B, Hkv, G, length)
        context_lens = torch.from_numpy(plan.context_lens)[:, None]
        key_positions = torch.arange(length)[None]
        unseen = key_positions >= context_lens
        if window:
            unseen = unseen | (key_positions < context_lens - window)
        scores.masked_fill_(unseen[:, None, None], float("-inf"))
        value.masked_fill_(unseen[:, None, :, None], 0)  # others' leftovers: a weight of 0 does not silence a NaN
        out[:count] = torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value).view(count, -1)

    def attend_chunk(self, qkv: Tensor, layer: int, chunk: Chunk, out: Tensor) -> None:
        query, key, value = query_key_value(qkv, layer, chunk, self.decoder, self.pool)
        mask = chunk.mask(self.decoder.layers[layer].window)
        # KV heads stand where SDPA expects the batch: the heads of a group then share K and V without a copy
        attended = F.scaled_dot_product_attention(
            query,
            key[:, None].expand(-1, query.shape[1], -1, -1),
            value[:, None].expand(-1, query.shape[1], -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        out[chunk.start : chunk.end] = attended.flatten(0, 1).transpose(0, 1).flatten(1)
