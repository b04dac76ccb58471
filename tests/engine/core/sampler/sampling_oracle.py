"""The sampler again, slow and plain: one row at a time, Python floats, whole sorts, no shortcut."""

from __future__ import annotations

import math

from inferdbg.engine.core.runner import SampleRow
from inferdbg.engine.core.sampling_params import SamplingParams

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def make_row(logits_row: int = 0, **values) -> SampleRow:
    defaults = {
        "seq_id": 100 + logits_row,
        "params": SamplingParams(),
        "seed": 0,
        "choice_index": 0,
        "output_index": 0,
        "prompt_ids": (),
        "output_ids": (),
    }
    return SampleRow(logits_row=logits_row, **{**defaults, **values})


def finalize(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def gumbel(seed: int, choice_index: int, output_index: int, token_id: int) -> float:
    key = 0
    for word in (seed, choice_index, output_index):
        key = finalize(((key + GOLDEN) ^ word) & MASK)
    hashed = finalize((key + (token_id + 1) * GOLDEN) & MASK)
    # the sampler orders hashes as signed numbers, which flips the top bit
    uniform = (((hashed ^ (1 << 63)) >> 11) + 0.5) / 2**53
    return -math.log(-math.log(uniform))


def processed(logits: list[float], row: SampleRow, eos: set[int]) -> list[float]:
    params, out = row.params, list(logits)
    for token_id, bias in params.logit_bias.items():
        if token_id < len(out):
            out[token_id] += bias
    if row.output_index < params.min_tokens:
        for token_id in set(params.stop_token_ids) | (set() if params.ignore_eos else eos):
            if token_id < len(out):
                out[token_id] = -math.inf
    for token_id in {*row.prompt_ids, *row.output_ids}:
        value = out[token_id]
        out[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id in set(row.output_ids):
        count = row.output_ids.count(token_id)
        out[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return out


def allowed(logits: list[float], params: SamplingParams) -> list[int]:
    """Token ids that may be sampled, best first."""
    peak = max(logits)
    weights = {i: math.exp((x - peak) / params.temperature) for i, x in enumerate(logits) if x > -math.inf}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))
    ranked = [i for i in ranked if weights[i] >= params.min_p]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    total, before, kept = math.fsum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if kept and params.top_p < 1.0 and before >= params.top_p * total:
            break
        kept.append(i)
        before += weights[i]
    return kept


def choose(logits: list[float], row: SampleRow, eos: set[int]) -> int:
    if row.forced_token_id is not None:
        return row.forced_token_id
    changed = processed(logits, row, eos)
    if row.params.is_greedy:
        return min(range(len(changed)), key=lambda i: (-changed[i], i))
    noisy = {
        i: changed[i] / row.params.temperature + gumbel(row.seed, row.choice_index, row.output_index, i)
        for i in allowed(changed, row.params)
    }
    return min(noisy, key=lambda i: (-noisy[i], i))
