"""Which tokens a row may sample at all: min_p, then top_k, then top_p, each on what the one before left.

Rows are filtered together but never see each other, and no row is sorted: only the candidates of a top_k, and the few
tokens near the edge of a top_p, are put in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferdbg.engine.core.sampler.candidates import BLOCK, BlockIndex, chunk_elements
from inferdbg.engine.core.sampling_params import SamplingParams

__all__ = ["is_filtered", "keep_allowed"]

NUM_HALVINGS = 8


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether any token is out of reach."""
    return params.min_p > 0.0 or params.top_p < 1.0 or 0 < params.top_k < vocab_size


def keep_allowed(scores: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
    """The scores (R, V) with -inf where a row may not sample; each row keeps one at least.

    `scores` are logits over temperature, each row's maximum being 0. Ties at an edge go to the lowest token ids. A
    token is in top_p if those before it, best first, have less than top_p of the probability that min_p and top_k left.
    """
    vocab_size = scores.shape[1]
    top_k = _column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in rows], scores).long()
    top_p = _column([p.top_p for p in rows], scores)
    least = torch.log(_column([p.min_p for p in rows], scores)).to(scores.dtype)  # log 0 is -inf: off
    kept = scores.masked_fill(scores < least[:, None], -torch.inf)
    has_top_k = top_k < vocab_size
    if bool(has_top_k.any()):
        kept[has_top_k] = _best(kept[has_top_k], top_k[has_top_k], top_p[has_top_k])
    needs_edge = ~has_top_k & (top_p < 1.0)
    num_together = max(1, chunk_elements(scores.device) // vocab_size)
    cut = needs_edge.nonzero()[:, 0]
    for start in range(0, len(cut), num_together):
        part = cut[start : start + num_together]
        kept[part] = _nucleus(kept[part], top_p[part])
    return kept


def _best(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The top_k (R,) best of each row, and of those the top_p (R,): few enough to be put in order."""
    index = BlockIndex(scores)
    columns, ranked = _rank(scores, (scores >= index.kth_bound(top_k)[:, None]) & ~scores.isneginf())
    mass = ranked.double().exp()
    mass[torch.arange(mass.shape[1], device=mass.device) >= top_k[:, None]] = 0.0
    cumulative = mass.cumsum(-1)
    limit = (top_p * cumulative[:, -1]).masked_fill(top_p >= 1.0, torch.inf)
    return _with(
        torch.full_like(scores, -torch.inf), columns, ranked, (mass > 0) & (cumulative - mass < limit[:, None])
    )


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

    columns, ranked = _rank(scores, (scores >= outer[:, None]) & (scores < inner[:, None]))
    between = ranked.double().exp()
    before = sure[:, None] + between.cumsum(-1) - between
    kept = scores.masked_fill(scores < inner[:, None], -torch.inf)
    return _with(kept, columns, ranked, (between > 0) & (before < wanted[:, None]))


def _rank(scores: torch.Tensor, is_candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and scores (R, K) of each row's candidates, best first, of equals the lowest column; then -inf."""
    rows, columns = is_candidate.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=scores.shape[0])
    width = max(1, int(counts.max()))
    place = torch.arange(rows.shape[0], device=rows.device) - (counts.cumsum(0) - counts)[rows]
    packed = scores.new_full((scores.shape[0], width), -torch.inf)
    packed_columns = columns.new_zeros((scores.shape[0], width))
    packed[rows, place] = scores[rows, columns]
    packed_columns[rows, place] = columns
    ranked = packed.sort(dim=-1, descending=True, stable=True)
    return packed_columns.gather(1, ranked.indices), ranked.values


def _with(kept: torch.Tensor, columns: torch.Tensor, ranked: torch.Tensor, is_in: torch.Tensor) -> torch.Tensor:
    """`kept`, changed: the ranked scores that are in are put back in their columns."""
    rows, ranks = is_in.nonzero(as_tuple=True)
    kept[rows, columns[rows, ranks]] = ranked[rows, ranks]
    return kept


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Float64 sums (R,), in blocks: torch splits the sum of a lone long row over threads, so it would depend on R."""
    if values.shape[1] % BLOCK:
        values = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK))
    return values.reshape(len(values), -1, BLOCK).sum(-1).double().cumsum(-1)[:, -1]


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)
