"""Chooses one token per row of logits, and records what the model thought of it.

Each row is treated by its own parameters and its own noise; rows are grouped by the work they need and each group is
done at once. Knows nothing of sequences' states: who stops, and why, is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from inferdbg.engine.core.runner import SampledTokens, SampleRow, ScoreRow
from inferdbg.engine.core.sampler.candidates import BlockIndex, Entries, best_entries, first_best
from inferdbg.engine.core.sampler.filters import is_filtered, keep_allowed
from inferdbg.engine.core.sampler.logprobs import row_logprobs, score_prompt
from inferdbg.engine.core.sampler.noise import Noise, noise_key
from inferdbg.engine.core.sampler.processors import is_processed, process_row

__all__ = ["Sampler"]

MIN_TEMPERATURE = 1e-10  # below, the same token wins; and the quotient stays finite in fp32
NUM_LEADERS = 64


class Sampler:
    """Samples from logits (R, V) of one model on one device."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._noise = Noise(vocab_size, device)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], scores: Sequence[ScoreRow], top_k: int
    ) -> SampledTokens:
        """One token for each of `rows`, log-probabilities for each of `scores`. `logits` are not changed.

        `top_k` alternatives are reported per token (all there are, in a smaller vocabulary). The greedy choice and
        every tie go to the lowest token id; a forced token is taken whatever the logits say.

        Raises:
            RowsFailed: the logits of some rows are NaN or +inf, or all -inf; nothing was sampled.
        """
        scored = tuple(score_prompt(logits, row) for row in scores)
        if not rows:
            return SampledTokens(token_ids=(), logprobs=(), top_k=top_k, top_ids=(), top_logprobs=(), scores=scored)
        top_k = min(top_k, self._vocab_size)
        picked = _pick(logits, [row.logits_row for row in rows])
        picked = picked.to(torch.promote_types(picked.dtype, torch.float32))  # float64 stays, for exact comparisons
        raw = row_logprobs(picked, max(top_k, 1), [row.seq_id for row in rows])

        chosen = raw.top_ids[:, 0].clone()  # right already for the greedy rows that nothing changes
        self._choose_others(picked, rows, chosen)
        top_ids = raw.top_ids[:, :top_k]
        return SampledTokens(
            token_ids=tuple(chosen.tolist()),
            logprobs=tuple(raw.of(chosen[:, None])[:, 0].tolist()),
            top_k=top_k,
            top_ids=tuple(top_ids.flatten().tolist()),
            top_logprobs=tuple(raw.of(top_ids).flatten().tolist()),
            scores=scored,
        )

    def _choose_others(self, picked: torch.Tensor, rows: Sequence[SampleRow], chosen: torch.Tensor) -> None:
        """Writes to `chosen` the tokens of all rows that are not plainly greedy."""
        greedy: list[int] = []
        sampled: list[int] = []
        for index, row in enumerate(rows):
            if row.forced_token_id is not None:
                chosen[index] = row.forced_token_id
            elif not row.params.is_greedy:
                sampled.append(index)
            elif is_processed(row):
                greedy.append(index)
        if greedy:
            chosen[greedy] = best_entries(self._processed(picked, rows, greedy), 1)[:, 0]
        if sampled:
            scores = self._scores(picked, rows, sampled)
            filtered = [i for i, index in enumerate(sampled) if is_filtered(rows[index].params, self._vocab_size)]
            if filtered:
                part = scores if len(filtered) == len(sampled) else scores[filtered]
                keep_allowed(part, [rows[sampled[i]].params for i in filtered])
                if part is not scores:
                    scores[filtered] = part
            chosen[sampled] = self._gumbel_max(scores, [rows[index] for index in sampled])

    def _processed(self, picked: torch.Tensor, rows: Sequence[SampleRow], indices: list[int]) -> torch.Tensor:
        """Some rows' logits after their processors; `picked` itself where these are all rows and none has any."""
        if not any(is_processed(rows[index]) for index in indices):
            return picked if len(indices) == len(rows) else picked[indices]
        copy = picked[indices]
        for position, index in enumerate(indices):
            if is_processed(rows[index]):
                process_row(copy[position], rows[index], self._eos_token_ids)
        return copy

    def _scores(self, picked: torch.Tensor, rows: Sequence[SampleRow], indices: list[int]) -> torch.Tensor:
        """Processed logits over temperature, shifted so that each row's maximum is 0."""
        processed = self._processed(picked, rows, indices)
        peak = processed.amax(-1, keepdim=True)
        if bool(peak.isneginf().any()):  # min_tokens masked all there is: then nothing is better than anything
            processed = processed.masked_fill(peak.isneginf(), 0.0)
            peak = processed.amax(-1, keepdim=True)
        temperatures = [max(rows[index].params.temperature, MIN_TEMPERATURE) for index in indices]
        divisor = torch.tensor(temperatures, dtype=processed.dtype, device=processed.device)[:, None]
        return torch.sub(processed, peak).div_(divisor)

    def _gumbel_max(self, scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """The token (R,) with the highest score plus noise, exactly, with logarithms for a few dozen tokens only.

        The leaders (the highest scores) are perturbed first. Any other token has at most the score `bound`, so it
        can only win with noise above ``best - bound``, and few have that.
        """
        words = [noise_key(row.seed, row.choice_index, row.output_index) for row in rows]
        keys = torch.tensor(words, dtype=torch.int64, device=scores.device)
        index = BlockIndex(scores)
        bound = index.kth_bound(torch.full_like(keys, min(NUM_LEADERS, self._vocab_size)))
        least = torch.finfo(scores.dtype).min  # what is filtered out is at -inf, and not a leader
        bound = bound.clamp_min(least)
        leaders = index.at_least(bound)
        noisy = self._perturbed(scores, leaders, keys)
        best = noisy.new_full((len(rows),), -torch.inf).scatter_reduce(0, leaders[0], noisy, "amax")
        has_others = (bound > least).nonzero()[:, 0]
        others = self._noise.exceeding(keys[has_others], (best - bound.double())[has_others])
        # some leaders are among the others, which does no harm
        either = (torch.cat([leaders[0], has_others[others[0]]]), torch.cat([leaders[1], others[1]]))
        return first_best(len(rows), either, self._perturbed(scores, either, keys))

    def _perturbed(self, scores: torch.Tensor, entries: Entries, keys: torch.Tensor) -> torch.Tensor:
        rows, columns = entries
        return scores[rows, columns].double() + self._noise.gumbel(keys[rows], columns)


def _pick(logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """The rows of logits that are sampled, without a copy where these are all of them."""
    if indices == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(indices, device=logits.device)]
