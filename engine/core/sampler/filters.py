"""Which tokens a row may sample at all: min_p, then top_k, then top_p, each on what the one before left.

Rows are filtered together but never see each other, and no row is sorted: only the candidates of a top_k, and the few
tokens near the edge of a top_p, are put in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferdbg.engine.core.sampler.candidates import BLOCK, BlockIndex, Entries, chunk_elements
from inferdbg.engine.core.sampling_params import SamplingParams

__all__ = ["is_filtered", "keep_allowed"]

NUM_HALVINGS = 8


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether any token is out of reach."""
    return params.min_p > 0.0 or params.top_p < 1.0 or 0 < params.top_k < vocab_size


def keep_allowed(scores: torch.Tensor, rows: Sequence[SamplingParams]) -> None:
    """Sets scores (R, V) to -inf, in place, where a row may not sample; each row keeps one at least.

    `scores` are logits over temperature, each row's maximum being 0. Ties at an edge go to the lowest token ids. A
    token is in top_p if those before it, best first, have less than top_p of the probability that min_p and top_k left.
    """
    vocab_size = scores.shape[1]
    if any(params.min_p > 0.0 for params in rows):
        least = torch.log(_column([params.min_p for params in rows], scores)).to(scores.dtype)  # log 0 is -inf: off
        scores.masked_fill_(scores < least[:, None], -torch.inf)
    has_top_k = [0 < params.top_k < vocab_size for params in rows]
    if best := [row for row, has in enumerate(has_top_k) if has]:
        _keep_best(scores, best, [rows[row] for row in best])
    cut = [row for row, has in enumerate(has_top_k) if not has and rows[row].top_p < 1.0]
    num_together = max(1, chunk_elements(scores.device) // vocab_size)
    for start in range(0, len(cut), num_together):
        part = cut[start : start + num_together]
        scores[part] = _nucleus(scores[part], _column([rows[row].top_p for row in part], scores))


def _keep_best(scores: torch.Tensor, indices: list[int], rows: Sequence[SamplingParams]) -> None:
    """Keeps the top_k best of some rows of scores, and of those the top_p: few enough to be put in order."""
    top_k = _column([params.top_k for params in rows], scores).long()
    top_p = _column([params.top_p for params in rows], scores)
    index = BlockIndex(scores if len(indices) == len(scores) else scores[indices])
    bound = index.kth_bound(top_k).clamp_min(torch.finfo(scores.dtype).min)  # not what min_p put at -inf
    candidates = index.at_least(bound)
    chosen = torch.tensor(indices, device=scores.device)
    columns, ranked = _rank(candidates, scores[chosen[candidates[0]], candidates[1]], len(indices))
    mass = ranked.double().exp()
    mass[torch.arange(mass.shape[1], device=mass.device) >= top_k[:, None]] = 0.0
    cumulative = mass.cumsum(-1)
    limit = (top_p * cumulative[:, -1]).masked_fill(top_p >= 1.0, torch.inf)
    kept_rows, ranks = ((mass > 0) & (cumulative - mass < limit[:, None])).nonzero(as_tuple=True)
    scores[chosen] = -torch.inf
    scores[chosen[kept_rows], columns[kept_rows, ranks]] = ranked[kept_rows, ranks]


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The top_p (R,) of each row, top_p < 1.

    Two thresholds are halved towards its edge: what reaches `outer` has top_p of the mass, what reaches `inner` has
    not. So everything from `inner` on is in, nothing below `outer` is, and only what lies between needs an order.
    """
    mass = scores.exp()
    wanted = top_p * _row_sums(mass)
    # All tokens below (1 - top_p) / V of the total have less than 1 - top_p of it together; one nat for rounding.
    outer = (torch.log((wanted / top_p) * (1.0 - top_p) / scores.shape[1]) - 1.0).to(scores.dtype)
    inner = torch.full_like(outer, torch.finfo(scores.dtype).tiny)  # above the maximum, which is 0
    masked = torch.empty_like(mass)
    for _ in range(NUM_HALVINGS):
        middle = (outer + inner) / 2
        falls_short = _row_sums(torch.mul(mass, scores >= middle[:, None], out=masked)) < wanted
        inner = torch.where(falls_short, middle, inner)
        outer = torch.where(falls_short, outer, middle)
    sure = _row_sums(torch.mul(mass, scores >= inner[:, None], out=masked))

    rows, places = ((scores >= outer[:, None]) & (scores < inner[:, None])).nonzero(as_tuple=True)
    columns, ranked = _rank((rows, places), scores[rows, places], len(scores))
    own = ranked.double().exp()
    before = sure[:, None] + own.cumsum(-1) - own
    in_rows, ranks = ((own > 0) & (before < wanted[:, None])).nonzero(as_tuple=True)
    kept = scores.masked_fill(scores < inner[:, None], -torch.inf)
    kept[in_rows, columns[in_rows, ranks]] = ranked[in_rows, ranks]
    return kept


def _rank(entries: Entries, values: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and values (num_rows, K) of each row's entries, best first, of equals the lowest column; then -inf.

    `entries`, in row-major order, have values (N,).
    """
    rows, columns = entries
    counts = torch.bincount(rows, minlength=num_rows)
    width = max(1, int(counts.max()))
    place = torch.arange(rows.shape[0], device=rows.device) - (counts.cumsum(0) - counts)[rows]
    packed = values.new_full((num_rows, width), -torch.inf)
    packed_columns = columns.new_zeros((num_rows, width))
    packed[rows, place] = values
    packed_columns[rows, place] = columns
    ranked = packed.sort(dim=-1, descending=True, stable=True)
    return packed_columns.gather(1, ranked.indices), ranked.values


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Float64 sums (R,), in blocks: torch splits the sum of a lone long row over threads, so it would depend on R."""
    if values.shape[1] % BLOCK:
        values = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK))
    return values.reshape(len(values), -1, BLOCK).sum(-1).double().cumsum(-1)[:, -1]


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)
