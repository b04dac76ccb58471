"""The noise is splitmix64, is Gumbel distributed, and depends on its key and token alone."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_oracle import gumbel

from inferdbg.engine.core.sampler.noise import Noise, noise_key

CPU = torch.device("cpu")


def test_hashes_are_splitmix64s_published_outputs() -> None:
    # The first outputs for seed 1234567, as in the reference implementation by S. Vigna.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    variates = Noise(4, CPU).gumbel(torch.full((4,), 1234567), torch.arange(4))
    uniform = torch.exp(-torch.exp(-variates))
    signed = [(word ^ (1 << 63)) / 2**64 for word in published]
    assert uniform.tolist() == pytest.approx(signed, abs=1e-12)


def test_keys_tell_seed_choice_and_index_apart() -> None:
    triples = [(s, c, i) for s in (0, 1, 2, 2**63 - 1) for c in range(4) for i in range(50)]
    assert len({noise_key(*triple) for triple in triples}) == len(triples)


def test_variates_are_the_oracles() -> None:
    noise = Noise(100, CPU)
    for seed, choice, index in [(0, 0, 0), (7, 1, 300), (2**63 - 1, 127, 10**6)]:
        keys = torch.full((100,), noise_key(seed, choice, index))
        expected = [gumbel(seed, choice, index, token_id) for token_id in range(100)]
        assert noise.gumbel(keys, torch.arange(100)).tolist() == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_variates_follow_the_gumbel_distribution() -> None:
    count = 200_000
    noise = Noise(count, CPU)
    variates = noise.gumbel(torch.full((count,), noise_key(3, 0, 1)), torch.arange(count)).sort().values
    cumulative = torch.exp(-torch.exp(-variates))
    steps = torch.arange(1, count + 1) / count
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed once in a thousand seeds
    assert float((cumulative - steps).abs().max()) < 1.95 / math.sqrt(count)


@pytest.mark.parametrize("vocab_size", [40, 70_000, 200_000])  # several rows a chunk, one, and a row beyond a chunk
def test_exceeding_finds_every_token_above_the_bound_and_hardly_any_other(vocab_size: int) -> None:
    noise = Noise(vocab_size, CPU)
    keys = torch.tensor([noise_key(seed, 0, 0) for seed in range(9)])
    bounds = torch.tensor([-50.0, -1.0, 0.0, 1.0, 3.0, 5.0, 8.0, 12.0, 60.0])
    rows, columns = noise.exceeding(keys, bounds)
    found = torch.zeros((9, vocab_size), dtype=torch.bool)
    found[rows, columns] = True
    variates = noise.gumbel(keys.repeat_interleave(vocab_size), torch.arange(vocab_size).repeat(9)).view(9, -1)
    assert bool(found[variates >= bounds[:, None]].all())
    assert bool((variates[found] > (bounds[:, None] - 1e-6).expand(9, vocab_size)[found]).all())
