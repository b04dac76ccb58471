"""Paged attention behind transformers' attention interface: decode rows together, prefill chunks one by one.

Knows nothing of models: a layer hands in q, k, v and its own terms (scaling, window, softcap, sinks). Where the
tokens' K and V go and which pages a query may see is in the step's `PagedBatch`, which a keyword of the model's
forward carries to every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

from inferdbg.engine.core.model.kv_pool import KVPool

__all__ = ["ATTENTION_NAME", "AttentionTerms", "BatchAttention", "PagedBatch", "PrefillChunk", "register_attention"]

ATTENTION_NAME = "inferdbg_paged"  # the mask interface does not know this name, so transformers builds no mask
QUERY_TILE = 128  # rows of a chunk whose scores are in memory at once, where SDPA cannot be used


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """What a layer adds to softmax(q k / …) v."""

    scaling: float
    window: int | None = None  # a query sees this many positions, itself included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # (Hq,) logits that take part in the softmax and have no value


class BatchAttention(Protocol):
    """One step's attention over the pages, as the registered function calls it."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """Stores k, v (T, Hkv, D) in their slots, then returns q (T, Hq, D) attending to its pages, (T, Hq, D)."""
        ...


def register_attention() -> None:
    """Makes ``attn_implementation=ATTENTION_NAME`` known to transformers; again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, Hq, T, D)
    key: torch.Tensor,  # (1, Hkv, T, D)
    value: torch.Tensor,  # (1, Hkv, T, D)
    attention_mask: None,
    *,
    scaling: float,
    paged: BatchAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    terms = AttentionTerms(scaling, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = paged.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), terms)
    return out.unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, end) of the flattened row: the last ``end - start`` of a sequence's `context_len` tokens."""

    start: int
    end: int
    context_len: int
    page_rows: torch.Tensor  # KVPool.page_rows of the pages that hold the context


class PagedBatch:
    """The attention of one step: the first `num_decodes` rows are decodes, then come the chunks.

    Args:
        slots: (T,)
        page_tables: (num_decodes, P) of the decodes alone.
        context_lens: (num_decodes,) likewise.
    """

    def __init__(
        self,
        pool: KVPool,
        slots: torch.Tensor,
        page_tables: torch.Tensor,
        context_lens: torch.Tensor,
        chunks: tuple[PrefillChunk, ...],
    ) -> None:
        self._pool = pool
        self._slot_rows = pool.slot_rows(slots)
        self._num_decodes = len(page_tables)
        self._page_rows = pool.page_rows(page_tables)
        self._last = context_lens[:, None] - 1  # (N, 1) each decode's own position
        self._kv_positions = torch.arange(page_tables.shape[1] * pool.page_size, device=slots.device)
        self._foreign = (self._kv_positions > self._last)[:, None, :, None]  # slots that hold others' leftovers
        self._chunks = chunks
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}  # by chunk (-1: the decodes) and window

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """See `BatchAttention`."""
        self._pool.write(layer, self._slot_rows, key, value)
        parts = [self._attend_chunk(layer, index, query, terms) for index in range(len(self._chunks))]
        if self._num_decodes:
            parts.insert(0, self._attend_decodes(layer, query[: self._num_decodes], terms))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(self, layer: int, query: torch.Tensor, terms: AttentionTerms) -> torch.Tensor:
        num, num_heads, dim = query.shape
        keys, values = self._pool.gather_pages(layer, self._page_rows, num)  # (N, Hkv, L, D)
        values.masked_fill_(self._foreign, 0)  # a weight of 0 does not silence a NaN
        if (mask := self._masks.get((-1, terms.window))) is None:
            mask = _hidden(self._last, self._kv_positions, terms.window)[:, None, None, :]
            self._masks[-1, terms.window] = mask
        grouped = query.reshape(num, self._pool.num_kv_heads, -1, dim)  # (N, Hkv, G, D)
        return _grouped_attention(grouped, keys, values, mask, terms).reshape(num, num_heads, dim)

    def _attend_chunk(self, layer: int, index: int, query: torch.Tensor, terms: AttentionTerms) -> torch.Tensor:
        chunk = self._chunks[index]
        num_queries, dim = chunk.end - chunk.start, query.shape[-1]
        keys, values = self._pool.gather_pages(layer, chunk.page_rows, 1)
        keys, values = keys[:, :, : chunk.context_len], values[:, :, : chunk.context_len]  # (1, Hkv, L, D)
        rows = query[chunk.start : chunk.end].transpose(0, 1).unsqueeze(0)  # (1, Hq, C, D)
        if (mask := self._masks.get((index, terms.window))) is None:
            kv_positions = torch.arange(chunk.context_len, device=query.device)
            positions = kv_positions[chunk.context_len - num_queries :, None]
            mask = _hidden(positions, kv_positions, terms.window)  # (C, L)
            self._masks[index, terms.window] = mask
        if terms.softcap is None and terms.sinks is None:
            causal = num_queries == chunk.context_len and (terms.window is None or terms.window >= num_queries)
            out = functional.scaled_dot_product_attention(
                rows, keys, values, attn_mask=None if causal else ~mask, is_causal=causal, scale=terms.scaling,
                enable_gqa=rows.shape[1] != keys.shape[1],
            )  # fmt: skip
            return out[0].transpose(0, 1)
        return torch.cat([
            self._attend_tile(rows[:, :, i : i + QUERY_TILE], keys, values, mask[i : i + QUERY_TILE], terms)
            for i in range(0, num_queries, QUERY_TILE)
        ]).reshape(num_queries, -1, dim)  # fmt: skip

    def _attend_tile(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """Rows (1, Hq, C, D) of one sequence through the grouped products -> (C, Hq, D)."""
        _, num_heads, num_queries, dim = rows.shape
        num_kv = keys.shape[1]
        grouped = rows.reshape(1, num_kv, -1, dim)  # (1, Hkv, G * C, D), group-major
        repeated = mask.repeat(num_heads // num_kv, 1)
        out = _grouped_attention(grouped, keys, values, repeated, terms)
        return out.reshape(num_heads, num_queries, dim).transpose(0, 1)


def _hidden(positions: torch.Tensor, kv_positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """True where a query at `positions` (…, 1) may not see `kv_positions` (L,)."""
    hidden = kv_positions > positions
    return hidden if window is None else hidden | (kv_positions <= positions - window)


def _grouped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, terms: AttentionTerms
) -> torch.Tensor:
    """Attention as one product per (sequence, KV head): q (N, Hkv, M, D), k and v (N, Hkv, L, D) -> (N, Hkv, M, D).

    The M rows are the queries of the heads that share a KV head. `hidden` broadcasts to (N, Hkv, M, L).
    The softmax is in float32 at least.
    """
    scores = torch.matmul(query, keys.transpose(-1, -2)) * terms.scaling
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if scores.dtype != torch.float64:
        scores = scores.float()
    scores = scores.masked_fill_(hidden, -torch.inf)
    if terms.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        num, num_kv, num_rows, _ = scores.shape
        per_head = num_rows * num_kv // len(terms.sinks)
        sinks = terms.sinks.to(scores.dtype).repeat_interleave(per_head).view(1, num_kv, num_rows, 1)
        weights = torch.softmax(torch.cat([scores, sinks.expand(num, -1, -1, -1)], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
