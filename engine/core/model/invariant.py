"""Batch invariance: a token's numbers are bitwise the same whatever shares its step, however its prompt was chunked,
and whether its prefix came from the cache.

The idea is constant shapes. The step's tokens are cut into tiles of exactly `ROWS` rows (padded), and the whole model
runs on one tile at a time; every row, decode or prefill, attends by itself over KV tiles of `KV_TILE` positions that
begin at multiples of it. So every product, reduction and elementwise loop always has the same shape, whichever kernel
a BLAS picks for it. What is left, that a row's result does not depend on its place in the tile, is checked at load.

Knows no sequence. It costs (`python -m benchmarks.batch_invariance`, SmolLM2's shape in bfloat16, one busy Zen 4
core, against the plain path): a decode step alone 2.1 x, 16 decodes together 1.2 x, a 512-token prefill 4.5 x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from inferdbg.engine.core.model.attention import AttentionTerms
from inferdbg.engine.core.model.experts import use_fixed_shape_experts
from inferdbg.engine.core.model.families import family_of
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.model.plain import PlainForward
from inferdbg.engine.core.runner import IntArray, StepBatch
from inferdbg.engine.errors import EnvironmentLacks

__all__ = ["KV_TILE", "ROWS", "InvariantForward"]

ROWS = 16
KV_TILE = 128
NOTHING_SEEN = -1e30  # running maximum before the first score: finite, so that exp(maximum - maximum) is 1
PROBE_TOKENS = 4


class InvariantForward:
    """A `Forward` on the plain path in constant shapes.

    Raises:
        EnvironmentLacks: on this machine a row's result depends on its place in a tile.
    """

    name = "plain-batch-invariant"

    def __init__(self, model: PreTrainedModel, pool: KVPool) -> None:
        self._plain = PlainForward(model, pool)
        if family_of(model).experts:
            use_fixed_shape_experts(model)
        self._pool = pool
        with torch.inference_mode():
            self._check_rows_are_alike()

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """See `Forward`."""
        owner = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
        with torch.inference_mode():
            parts = [self._tile(batch, owner, start) for start in range(0, len(batch.token_ids), ROWS)]
            return torch.cat(parts)

    def _tile(self, batch: StepBatch, owner: IntArray, start: int) -> torch.Tensor:
        """Logits (r, vocab) of the wanted rows among tokens [start, start + ROWS)."""
        here = slice(start, start + ROWS)
        page_tables = np.full((ROWS, batch.page_tables.shape[1]), self._pool.scratch_page)
        page_tables[: len(owner[here])] = batch.page_tables[owner[here]]
        wanted = batch.logits_rows[(batch.logits_rows >= start) & (batch.logits_rows < start + ROWS)] - start
        logits = self._compute(
            _padded(batch.token_ids[here], 0),
            _padded(batch.positions[here], 0),
            _padded(batch.slots[here], self._pool.scratch_page * self._pool.page_size),
            page_tables,
            _padded(wanted, 0) if len(wanted) else wanted,
        )
        return logits[: len(wanted)]

    def _compute(
        self, token_ids: IntArray, positions: IntArray, slots: IntArray, page_tables: IntArray, rows: IntArray
    ) -> torch.Tensor:
        device = self._pool.device
        on_device = [torch.from_numpy(array).to(device) for array in (token_ids, positions, slots, page_tables, rows)]
        paged = InvariantBatch(self._pool, on_device[1], on_device[2], on_device[3], int(positions.max()))
        return self._plain.compute(on_device[0], on_device[1], on_device[4], paged)

    def _check_rows_are_alike(self) -> None:
        """A tile of equal rows must give equal rows, bit for bit. The scratch page stands in for a long context."""
        pool = self._pool
        generator = torch.Generator().manual_seed(0)
        for layer in (*pool.keys, *pool.values):
            page = layer[pool.scratch_page]
            page.copy_(torch.randn(page.shape, generator=generator).to(page))
        position = KV_TILE + 3  # the second KV tile is begun
        page_tables = np.full((ROWS, position // pool.page_size + 1), pool.scratch_page)
        slot = pool.scratch_page * pool.page_size + position % pool.page_size
        for token_id in range(PROBE_TOKENS):
            logits = self._compute(
                np.full(ROWS, token_id), np.full(ROWS, position), np.full(ROWS, slot), page_tables, np.arange(ROWS)
            )
            if not torch.equal(logits, logits[:1].expand_as(logits)):
                raise EnvironmentLacks(
                    f"batch invariance cannot be had here: with {torch.get_num_threads()} threads a row's numbers "
                    f"depend on its place in a tile of {ROWS} rows. Try another number of threads (1 is the surest), "
                    "or do without batch_invariant"
                )


@dataclass(frozen=True, slots=True)
class _KVTile:
    """KV positions [start, start + KV_TILE) of every row's own sequence."""

    positions: torch.Tensor  # (KV_TILE,)
    rows: torch.Tensor  # (ROWS * Hkv * KV_TILE,) where each head's K and V lie
    unseen: torch.Tensor  # (ROWS, KV_TILE) after the row's own position: later tokens, or others' leftovers


class InvariantBatch:
    """A `BatchAttention`: each of `ROWS` queries over its own gathered KV, tile by tile, with an online softmax.

    A KV tile that a row may not see leaves that row's maximum, sum and output as they are, bit for bit; so how many
    tiles are walked, which the longest row of the tile decides, changes nothing for the others.
    """

    def __init__(
        self,
        pool: KVPool,
        positions: torch.Tensor,  # (ROWS,)
        slots: torch.Tensor,  # (ROWS,)
        page_tables: torch.Tensor,  # (ROWS, P)
        last_position: int,
    ) -> None:
        self._pool = pool
        self._positions = positions[:, None]
        self._slot_rows = pool.slot_rows(slots)
        self._tiles = [
            self._tile_at(start, positions[:, None], page_tables) for start in range(0, last_position + 1, KV_TILE)
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """See `BatchAttention`. The softmax and both products are in float32 at least."""
        pool = self._pool
        pool.write(layer, self._slot_rows, key, value)
        dtype = torch.promote_types(query.dtype, torch.float32)
        grouped = query.reshape(ROWS, pool.num_kv_heads, -1, pool.head_dim).to(dtype)  # (R, Hkv, G, D)
        if terms.sinks is None:
            maximum = torch.full_like(grouped[..., :1], NOTHING_SEEN)  # (R, Hkv, G, 1)
            total = torch.zeros_like(maximum)
        else:
            maximum = terms.sinks.to(dtype).view(1, pool.num_kv_heads, -1, 1).expand(ROWS, -1, -1, -1).contiguous()
            total = torch.ones_like(maximum)
        out = torch.zeros_like(grouped)
        for tile in self._tiles:
            keys = self._gather(pool.keys[layer], tile).to(dtype)  # (R, Hkv, KV_TILE, D)
            scores = torch.matmul(grouped, keys.transpose(-1, -2)) * terms.scaling
            if terms.softcap is not None:
                scores = torch.tanh(scores / terms.softcap) * terms.softcap
            scores = scores.masked_fill_(self._hidden(tile, terms.window), -torch.inf)
            new_maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
            weights = torch.exp(scores - new_maximum)
            shrink = torch.exp(maximum - new_maximum)
            total = total * shrink + weights.sum(dim=-1, keepdim=True)
            values = self._gather(pool.values[layer], tile).masked_fill_(
                tile.unseen[:, None, :, None], 0
            )  # 0 * NaN is NaN
            out = out * shrink + torch.matmul(weights, values.to(dtype))
            maximum = new_maximum
        return (out / total).to(query.dtype).reshape(ROWS, -1, pool.head_dim)

    def _tile_at(self, start: int, positions: torch.Tensor, page_tables: torch.Tensor) -> _KVTile:
        """Positions past a row's pages lie in the scratch page."""
        pool = self._pool
        kv_positions = torch.arange(start, start + KV_TILE, device=positions.device)
        column = kv_positions.div(pool.page_size, rounding_mode="floor")
        pages = page_tables[:, column.clamp(max=page_tables.shape[1] - 1)]  # (ROWS, KV_TILE)
        pages = torch.where(column < page_tables.shape[1], pages, pool.scratch_page)
        rows = pool.slot_rows(pages * pool.page_size + kv_positions % pool.page_size)
        return _KVTile(kv_positions, rows.transpose(1, 2).reshape(-1), kv_positions > positions)

    def _gather(self, layer: torch.Tensor, tile: _KVTile) -> torch.Tensor:
        heads = layer.view(-1, self._pool.head_dim).index_select(0, tile.rows)
        return heads.view(ROWS, self._pool.num_kv_heads, KV_TILE, self._pool.head_dim)

    def _hidden(self, tile: _KVTile, window: int | None) -> torch.Tensor:
        hidden = tile.unseen
        if window is not None:
            hidden = hidden | (tile.positions <= self._positions - window)
        return hidden[:, None, None, :]


def _padded(values: IntArray, padding: int) -> IntArray:
    padded = np.full(ROWS, padding)
    padded[: len(values)] = values
    return padded
