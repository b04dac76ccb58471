"""Raw log-probabilities: fp32 log-softmax of the model's logits, before anything changes them.

`log_softmax` and not `logsumexp`: the former's kernel reduces each row by itself, the latter's splits a lone long
row over threads, and the numbers of a request would depend on its company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferdbg.engine.core.runner import RowsFailed, ScoreRow
from inferdbg.engine.core.sampler.candidates import best_entries

__all__ = ["RowLogprobs", "row_logprobs", "score_prompt"]

SCORE_CHUNK = 64  # rows scored at a time: bounds the memory of long prompts
Columns = tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities (R, V), fp32, and the ids (R, k) of each row's best tokens, best first."""

    logprobs: torch.Tensor
    top_ids: torch.Tensor

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of token ids (R, m), one row each."""
        return self.logprobs.gather(1, token_ids)


def row_logprobs(logits: torch.Tensor, k: int, seq_ids: Sequence[int]) -> RowLogprobs:
    """Of logits (R, V) in the model's dtype. The order of the best is the logits' own, of equals the lowest id.

    Raises:
        RowsFailed: rows that have NaN or +inf, or nothing but -inf; all such sequences are named.
    """
    logprobs = logits.float().log_softmax(-1)
    bad = logprobs[:, 0].isnan()  # each of these makes every entry of the row NaN, so one column tells
    if bool(bad.any()):
        failed = tuple(dict.fromkeys(seq_ids[row] for row in bad.nonzero()[:, 0].tolist()))
        named = f"sequence{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}"
        raise RowsFailed(
            failed,
            f"the model computed logits that are not numbers for {named}; "
            "its weights are damaged, or its values overflow this dtype",
        )
    top_ids = best_entries(logits, k) if k else torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    return RowLogprobs(logprobs, top_ids)


def score_prompt(logits: torch.Tensor, row: ScoreRow) -> Columns:
    """Log-probabilities of the row's targets (m,), and ids and log-probabilities of the k best (m * k,).

    In a vocabulary smaller than the row's k, k is all there are.

    Raises:
        RowsFailed: as `row_logprobs`.
    """
    k = min(row.k, logits.shape[1])
    logprobs: list[float] = []
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    for start in range(0, len(row.target_ids), SCORE_CHUNK):
        targets = row.target_ids[start : start + SCORE_CHUNK]
        first = row.first_logits_row + start
        part = row_logprobs(logits[first : first + len(targets)], k, [row.seq_id] * len(targets))
        logprobs += part.of(torch.tensor(targets, device=logits.device)[:, None])[:, 0].tolist()
        top_ids += part.top_ids.flatten().tolist()
        top_logprobs += part.of(part.top_ids).flatten().tolist()
    return tuple(logprobs), tuple(top_ids), tuple(top_logprobs)
