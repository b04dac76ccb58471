"""What a prefill chunk attends to, out of the step's own rows or out of the pages. Knows no attention."""

from __future__ import annotations

from torch import Tensor

from inferdbg.engine.core.model.fast.plan import Chunk
from inferdbg.engine.core.model.fast.weights import Decoder
from inferdbg.engine.core.model.kv_pool import KVPool

__all__ = ["query_key_value"]


def query_key_value(
    qkv: Tensor, layer: int, chunk: Chunk, decoder: Decoder, pool: KVPool
) -> tuple[Tensor, Tensor, Tensor]:
    """Q (Hkv, G, rows, D) of a chunk, and K, V (Hkv, context, D) of all that its sequence has so far.

    `qkv` (T, (Hq + 2 Hkv) * D) holds the step's rows after rope; their K and V are in the pool already.
    """
    rows, heads, kv_heads, dim = chunk.end - chunk.start, decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
    by_head = qkv[chunk.start : chunk.end].view(rows, heads + 2 * kv_heads, dim).transpose(0, 1)
    query = by_head[:heads].reshape(kv_heads, heads // kv_heads, rows, dim)
    if rows == chunk.context_len:
        return query, by_head[heads : heads + kv_heads], by_head[heads + kv_heads :]
    return query, _gather(pool.keys[layer], chunk), _gather(pool.values[layer], chunk)


def _gather(kv: Tensor, chunk: Chunk) -> Tensor:
    pages = kv[chunk.pages].transpose(0, 1)  # (Hkv, P, page, D)
    return pages.flatten(1, 2)[:, : chunk.context_len]
