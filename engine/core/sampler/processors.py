"""What changes logits before a token is chosen: bias, min_tokens, penalties. Each row's own; vLLM's formulas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from inferdbg.engine.core.runner import SampleRow

__all__ = ["is_processed", "process_row"]


def is_processed(row: SampleRow) -> bool:
    """Whether the row's choice is made from anything but the model's own logits."""
    params = row.params
    return bool(
        params.logit_bias
        or row.output_index < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def process_row(logits: torch.Tensor, row: SampleRow, eos_token_ids: Sequence[int]) -> None:
    """Changes one row of logits (V,) in place, in the order that `SamplingParams` states.

    Token ids outside the vocabulary have no effect. What overflows upwards is the largest number there is, so that
    differences stay numbers; what overflows downwards is out of reach, as -inf says.
    """
    params = row.params
    if params.logit_bias:
        ids = _index(params.logit_bias.keys(), logits)
        in_range = [bias for token_id, bias in params.logit_bias.items() if token_id < logits.shape[0]]
        logits[ids] += torch.tensor(in_range, dtype=logits.dtype, device=logits.device)
    if row.output_index < params.min_tokens:
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        logits[_index(ends, logits)] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = _index({*row.prompt_ids, *row.output_ids}, logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        token_ids, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        logits[torch.from_numpy(token_ids).to(logits.device)] -= torch.from_numpy(penalty).to(logits)
    logits.clamp_(max=torch.finfo(logits.dtype).max)


def _index(token_ids: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    in_range = [token_id for token_id in token_ids if token_id < logits.shape[0]]
    return torch.tensor(in_range, dtype=torch.int64, device=logits.device)
