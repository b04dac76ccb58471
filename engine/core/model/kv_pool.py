"""The memory behind the KV pages. Knows no sequence, no owner, no free list."""

from __future__ import annotations

import torch

from inferdbg.engine.core.model_info import ModelInfo

__all__ = ["KVPool"]


class KVPool:
    """K and V of every layer, by page.

    Pages 0 … num_pages - 1 belong to the cache manager. One more page, `scratch_page`, belongs to nobody: rows that
    pad a batch write there.

    keys[layer], values[layer]: (num_pages + 1, num_kv_heads, page_size, head_dim)
    Token slot `s` is page ``s // page_size``, offset ``s % page_size``.
    """

    def __init__(
        self, info: ModelInfo, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_pages + 1, info.num_kv_heads, page_size, info.head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = info.num_kv_heads
        self.head_dim = info.head_dim
        self.dtype = dtype
        self.device = device
        self.scratch_page = num_pages
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(info.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(info.num_layers)]

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Where the heads of token slots lie in a layer seen as rows of one head: (…) -> (…, num_kv_heads)."""
        page, offset = slots.div(self.page_size, rounding_mode="floor"), slots % self.page_size
        heads = torch.arange(self.num_kv_heads, device=slots.device)
        return (page.unsqueeze(-1) * self.num_kv_heads + heads) * self.page_size + offset.unsqueeze(-1)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores K and V (T, num_kv_heads, head_dim) at ``rows = slot_rows(slots)`` (T, num_kv_heads)."""
        flat = rows.reshape(-1)
        self.keys[layer].view(-1, self.head_dim).index_copy_(0, flat, keys.reshape(-1, self.head_dim))
        self.values[layer].view(-1, self.head_dim).index_copy_(0, flat, values.reshape(-1, self.head_dim))

    def page_rows(self, page_tables: torch.Tensor) -> torch.Tensor:
        """Indices for `gather_pages`: (D, P) page ids -> (D * num_kv_heads * P,)."""
        heads = torch.arange(self.num_kv_heads, device=page_tables.device)[:, None]
        return (page_tables[:, None, :] * self.num_kv_heads + heads).reshape(-1)

    def gather_pages(self, layer: int, rows: torch.Tensor, num_tables: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies whole pages together: K and V, each (num_tables, num_kv_heads, P * page_size, head_dim)."""
        shape = (num_tables, self.num_kv_heads, -1, self.head_dim)
        row_len = self.page_size * self.head_dim
        keys = self.keys[layer].view(-1, row_len).index_select(0, rows)
        values = self.values[layer].view(-1, row_len).index_select(0, rows)
        return keys.view(shape), values.view(shape)

    @staticmethod
    def bytes_per_page(info: ModelInfo, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of K and V over all layers for one page."""
        return 2 * info.num_layers * info.num_kv_heads * page_size * info.head_dim * dtype.itemsize
