"""The few best entries of long rows, without sorting the rows. Knows nothing of what the rows mean."""

from __future__ import annotations

import torch

__all__ = ["BLOCK", "BlockIndex", "Entries", "best_entries", "chunk_elements", "first_best"]

BLOCK = 64
CPU_CHUNK = 1 << 17  # what the second-level cache holds of scratch
CUDA_CHUNK = 1 << 25

Entries = tuple[torch.Tensor, torch.Tensor]
"""Rows and columns of N entries of a matrix, int64 (N,) each."""


class BlockIndex:
    """The maxima of blocks of columns of values (R, V): made in one pass, they tell where large entries are."""

    def __init__(self, values: torch.Tensor) -> None:
        num_rows, width = values.shape
        if width % BLOCK:  # no model's vocabulary of note: a copy is fine
            values = torch.nn.functional.pad(values, (0, -width % BLOCK), value=-torch.inf)
        self._width = width
        self._blocks = values.reshape(num_rows, -1, BLOCK)  # (R, blocks, BLOCK)
        self._maxima = self._blocks.amax(-1)  # (R, blocks)

    def kth_bound(self, k: torch.Tensor) -> torch.Tensor:
        """For each row a number (R,) that at least k (R,) of its entries reach; a close one.

        It is the k-th largest maximum of a block, since every such block has an entry that reaches it. Where there
        are fewer blocks than k, it is -inf.
        """
        num_kept = min(int(k.max()), self._maxima.shape[1])
        top = self._maxima.topk(num_kept, dim=-1).values
        bound = top.gather(1, (k - 1).clamp(0, num_kept - 1)[:, None])[:, 0]
        return bound.masked_fill(k > num_kept, -torch.inf)

    def at_least(self, bound: torch.Tensor) -> Entries:
        """The entries that reach bound (R,), in row-major order."""
        rows, blocks = (self._maxima >= bound[:, None]).nonzero(as_tuple=True)
        values = self._blocks.flatten(0, 1)[rows * self._blocks.shape[1] + blocks]  # (N, BLOCK)
        hits, offsets = (values >= bound[rows, None]).nonzero(as_tuple=True)
        columns = blocks[hits] * BLOCK + offsets
        if self._width % BLOCK == 0:
            return rows[hits], columns
        in_row = columns < self._width  # the padding reaches a bound of -inf
        return rows[hits][in_row], columns[in_row]


def chunk_elements(device: torch.device) -> int:
    """How many entries of a matrix are best worked on at a time by a series of elementwise steps."""
    return CPU_CHUNK if device.type == "cpu" else CUDA_CHUNK


def best_entries(values: torch.Tensor, k: int) -> torch.Tensor:
    """Columns (R, k) of the k largest entries of each row, best first; of equals the lowest column first.

    (`torch.topk` leaves open which of several equals it takes.) NaN is not expected.
    """
    num_rows, width = values.shape
    if not 1 <= k <= width:
        raise ValueError(f"k must lie between 1 and {width}, {k} given")
    index = BlockIndex(values)
    rows, columns = index.at_least(index.kth_bound(torch.full((num_rows,), k, device=values.device)))
    # Two stable sorts, by value and then by row, leave equals in the order of their columns.
    by_value = values[rows, columns].sort(descending=True, stable=True).indices
    by_row = rows[by_value].sort(stable=True).indices
    starts = torch.searchsorted(rows, torch.arange(num_rows, device=values.device))
    ranked = columns[by_value][by_row]
    return ranked[starts[:, None] + torch.arange(k, device=values.device)]


def first_best(num_rows: int, entries: Entries, values: torch.Tensor) -> torch.Tensor:
    """The column (num_rows,) of the largest value (N,) among each row's entries; of equals the lowest column."""
    rows, columns = entries
    best = values.new_full((num_rows,), -torch.inf).scatter_reduce(0, rows, values, "amax")
    is_best = values == best[rows]
    none = columns.new_full((num_rows,), torch.iinfo(torch.int64).max)
    return none.scatter_reduce(0, rows[is_best], columns[is_best], "amin")
