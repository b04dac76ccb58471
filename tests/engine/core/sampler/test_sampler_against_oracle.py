"""The vectorised sampler against the plain one, and against transformers' own warpers, on seeded random rows."""

from __future__ import annotations

import random

import pytest
import torch
from sampling_oracle import choose, make_row
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inferdbg.engine.core.sampler.filters import keep_allowed
from inferdbg.engine.core.sampler.processors import process_row
from inferdbg.engine.core.sampler.sampler import Sampler
from inferdbg.engine.core.sampling_params import SamplingParams

CPU = torch.device("cpu")
EOS = {2, 7, 100_000}  # one of them beyond any vocabulary here


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    def pick(*values):
        return rng.choice(values)

    return SamplingParams(
        max_tokens=100,
        min_tokens=pick(0, 0, 5),
        temperature=pick(0.0, 0.3, 1.0, 1.0, 2.5),
        top_p=pick(1.0, 1.0, 0.9, 0.5, 1e-6),
        top_k=pick(0, 0, -1, 1, 5, 40, vocab_size, 10 * vocab_size),
        min_p=pick(0.0, 0.0, 0.05, 1.0),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.8),
        presence_penalty=pick(0.0, 0.0, 1.5, -2.0),
        frequency_penalty=pick(0.0, 0.0, 0.7, -0.4),
        logit_bias=pick({}, {}, {3: -100.0, 11: 4.0, 10**6: 5.0}),
        stop_token_ids=pick((), (5, 10**6)),
        ignore_eos=pick(False, True),
    )


@pytest.mark.parametrize("vocab_size", [12, 64, 200, 1000])
def test_every_parameter_together_chooses_what_the_plain_sampler_chooses(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    sampler = Sampler(vocab_size, EOS, CPU)
    num_rows = 60
    spread = torch.tensor([0.2, 1.0, 4.0])[torch.randint(3, (num_rows, 1), generator=generator)].double()
    logits = torch.randn(num_rows, vocab_size, dtype=torch.float64, generator=generator) * spread
    logits[::4] = logits[::4].round()  # ties
    order = list(range(num_rows))
    rng.shuffle(order)
    rows = [
        make_row(
            logits_row,
            params=random_params(rng, vocab_size),
            seed=rng.randrange(2**63),
            choice_index=rng.randrange(3),
            output_index=rng.randrange(10),
            prompt_ids=tuple(rng.choices(range(vocab_size), k=5)),
            output_ids=tuple(rng.choices(range(vocab_size), k=rng.randrange(20))),
            forced_token_id=rng.choice([None] * 9 + [4]),
        )
        for logits_row in order
    ]

    sampled = sampler.sample(logits, rows, [], 2)

    expected = [choose(logits[row.logits_row].tolist(), row, EOS) for row in rows]
    assert list(sampled.token_ids) == expected
    # fp32 log-softmax of what the model said, whatever was done to choose
    raw = logits[order].float().log_softmax(-1)
    assert sampled.logprobs == pytest.approx(raw.gather(1, torch.tensor(expected)[:, None])[:, 0].tolist(), abs=1e-5)


def test_a_whole_vocabulary_is_sampled_as_if_every_token_had_been_perturbed() -> None:
    """The shortcut over a real vocabulary, peaked and flat, takes the token that the plain sampler takes."""
    vocab_size = 20_011
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, vocab_size, dtype=torch.float64, generator=generator)
    logits *= torch.tensor([0.0, 0.01, 0.5, 1.0, 2.0, 4.0, 6.0, 10.0])[:, None]
    rows = [make_row(i, seed=i, output_index=9) for i in range(8)]

    sampled = Sampler(vocab_size, EOS, CPU).sample(logits, rows, [], 1)

    assert list(sampled.token_ids) == [choose(logits[i].tolist(), rows[i], EOS) for i in range(8)]


def _allowed(scores: torch.Tensor, params: SamplingParams) -> list[set[int]]:
    shifted = scores - scores.amax(-1, keepdim=True)
    kept = shifted.clone()
    keep_allowed(kept, [params] * len(scores))
    allowed = kept.isfinite()
    assert torch.equal(kept[allowed], shifted[allowed])
    return [set(row.nonzero()[:, 0].tolist()) for row in allowed]


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(top_k=1), TopKLogitsWarper(1)),
        (SamplingParams(top_k=50), TopKLogitsWarper(50)),
        (SamplingParams(top_k=2000), TopKLogitsWarper(2000)),
        (SamplingParams(top_p=0.1), TopPLogitsWarper(0.1)),
        (SamplingParams(top_p=0.9), TopPLogitsWarper(0.9)),
        (SamplingParams(top_p=0.999), TopPLogitsWarper(0.999)),
        (SamplingParams(top_p=0.999999), TopPLogitsWarper(0.999999)),
        (SamplingParams(min_p=0.02), MinPLogitsWarper(0.02)),
        (SamplingParams(min_p=0.5), MinPLogitsWarper(0.5)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, SamplingParams) else "",
)
def test_filters_allow_what_transformers_allows(params: SamplingParams, warper) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(12, 3000, dtype=torch.float64, generator=generator) * torch.linspace(0.01, 9, 12)[:, None]
    warped = warper(torch.zeros(12, 1, dtype=torch.long), scores.clone())
    assert _allowed(scores, params) == [set(row.isfinite().nonzero()[:, 0].tolist()) for row in warped]


def test_top_k_and_top_p_together_are_transformers_one_after_the_other() -> None:
    scores = torch.randn(12, 3000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2
    ids = torch.zeros(12, 1, dtype=torch.long)
    warped = TopPLogitsWarper(0.7)(ids, TopKLogitsWarper(40)(ids, scores.clone()))
    expected = [set(row.isfinite().nonzero()[:, 0].tolist()) for row in warped]
    assert _allowed(scores, SamplingParams(top_k=40, top_p=0.7)) == expected


def test_the_repetition_penalty_is_transformers() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3))
    prompt, output = (3, 4, 4, 9), (9, 250, 250, 499)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]
    row = make_row(params=SamplingParams(repetition_penalty=1.7), prompt_ids=prompt, output_ids=output)
    process_row(logits, row, ())
    assert torch.allclose(logits, expected)
