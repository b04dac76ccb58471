"""Counter-based noise: a token's Gumbel variate is a hash of (seed, choice, output index, token id), nothing else.

So a seeded request does not depend on its company, on the batch's shape or on being preempted and resumed. Integer
arithmetic wraps alike on every device; only the two logarithms at the end, in float64, may differ in the last bit.
"""

from __future__ import annotations

import torch

from inferdbg.engine.core.sampler.candidates import Entries, chunk_elements

__all__ = ["Noise", "noise_key"]

# splitmix64: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
UNIFORM_BITS = 53
SLACK = 2.0**-40  # of the uniform, for the rounding of the logarithms


def noise_key(seed: int, choice_index: int, output_index: int) -> int:
    """The key of one sampled token's noise, as a signed 64-bit integer."""
    state = 0
    for word in (seed, choice_index, output_index):
        state = _mix((state + GOLDEN) ^ (word & MASK))
    return _signed(state)


class Noise:
    """The noise of a vocabulary of `vocab_size` tokens, for any number of keys (`noise_key`)."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        # (V,) splitmix64's state for each token id, before the key is added
        self._states = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(GOLDEN)
        self._chunk = max(1, chunk_elements(device) // vocab_size)

    def gumbel(self, keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Float64 Gumbel(0, 1) variates of keys (N,) and token ids (N,), elementwise."""
        hashes = self._states[token_ids] + keys
        _finalize(hashes, torch.empty_like(hashes))
        # An arithmetic shift, then to 0 … 2^53 - 1; the half keeps 0 and 1 out.
        bits = (hashes >> (64 - UNIFORM_BITS)) + (1 << (UNIFORM_BITS - 1))
        uniform = (bits.double() + 0.5) * 2.0**-UNIFORM_BITS
        return -torch.log(-torch.log(uniform))

    def exceeding(self, keys: torch.Tensor, bounds: torch.Tensor) -> Entries:
        """All tokens whose noise for keys (R,) reaches bounds (R,), and perhaps a few that just miss it.

        It compares hashes, so it takes no logarithm of the whole vocabulary.
        """
        uniform = torch.exp(-torch.exp(-bounds.double())) - SLACK
        # The hash as a signed number grows with the uniform: -2^63 is 0, 2^63 would be 1.
        least = ((uniform.clamp(0.0, 1.0 - SLACK) - 0.5) * 2.0**64).long()
        state = self._states.new_empty((min(self._chunk, len(keys)), len(self._states)))
        shifted = torch.empty_like(state)
        none = keys.new_empty(0)
        found: list[Entries] = [(none, none)]
        for start in range(0, len(keys), self._chunk):
            part = slice(start, start + self._chunk)
            num_rows = len(keys[part])
            hashes = torch.add(self._states, keys[part, None], out=state[:num_rows])
            _finalize(hashes, shifted[:num_rows])
            rows, columns = (hashes >= least[part, None]).nonzero(as_tuple=True)
            found.append((rows + start, columns))
        return torch.cat([rows for rows, _ in found]), torch.cat([columns for _, columns in found])


def _finalize(state: torch.Tensor, shifted: torch.Tensor) -> None:
    """splitmix64's finalizer, in place; `shifted` is scratch of the same shape. Its cost is memory traffic."""
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
        torch.bitwise_right_shift(state, shift, out=shifted)
        shifted.bitwise_and_((1 << (64 - shift)) - 1)  # int64 shifts drag the sign along
        state.bitwise_xor_(shifted)
        if factor is not None:
            state.mul_(_signed(factor))


def _mix(state: int) -> int:
    """splitmix64's finalizer on a Python integer."""
    state &= MASK
    state = ((state ^ (state >> 30)) * MIX_1) & MASK
    state = ((state ^ (state >> 27)) * MIX_2) & MASK
    return state ^ (state >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
