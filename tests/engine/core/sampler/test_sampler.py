"""What the sampler promises: fixed ties, independence of company, the right distribution, raw logprobs."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_oracle import make_row

from inferdbg.engine.core.runner import SampledTokens, SampleRow, ScoreRow
from inferdbg.engine.core.sampler.candidates import best_entries
from inferdbg.engine.core.sampler.sampler import Sampler
from inferdbg.engine.core.sampling_params import SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def sample(logits: torch.Tensor, rows: list[SampleRow], top_k: int = 2, eos: tuple[int, ...] = ()) -> SampledTokens:
    return Sampler(logits.shape[1], eos, CPU).sample(logits, rows, [], top_k)


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)


MIXED = (
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=40, top_p=0.8, temperature=1.3),
    SamplingParams(min_p=0.1),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
    SamplingParams(logit_bias={5: 8.0}, top_p=0.99),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [49_152, 100_003, 37])
def test_a_row_alone_gives_bitwise_what_it_gives_in_company(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(16, vocab_size, dtype)
    rows = [
        make_row(i, params=MIXED[i % len(MIXED)], seed=i, output_index=i, prompt_ids=(1, 2), output_ids=(3, 3))
        for i in range(16)
    ]
    sampler = Sampler(vocab_size, (), CPU)
    together = sampler.sample(logits, rows, [], 3)
    for members in ([0], [5], [15], [4, 9, 3], list(range(7))):
        some = [make_row(j, **_identity(rows[i])) for j, i in enumerate(members)]
        apart = sampler.sample(logits[members].clone(), some, [], 3)
        for j, i in enumerate(members):
            assert apart.token_ids[j] == together.token_ids[i]
            assert apart.logprobs[j] == together.logprobs[i]
            assert apart.top_ids[j * 3 : j * 3 + 3] == together.top_ids[i * 3 : i * 3 + 3]
            assert apart.top_logprobs[j * 3 : j * 3 + 3] == together.top_logprobs[i * 3 : i * 3 + 3]


def _identity(row: SampleRow) -> dict:
    names = ("params", "seed", "choice_index", "output_index", "prompt_ids", "output_ids")
    return {name: getattr(row, name) for name in names}


@pytest.mark.parametrize("name", ["seed", "choice_index", "output_index"])
def test_seed_choice_and_index_each_change_the_sample(name: str) -> None:
    logits = torch.zeros(50, 1000)
    rows = [make_row(i, **{name: i}) for i in range(50)]
    assert len(set(sample(logits, rows).token_ids)) > 40


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (SamplingParams(temperature=0.5), [0.16, 0.09, 0.0225, 0.01, 0.0025]),
        (SamplingParams(temperature=2.0), [math.sqrt(p) for p in (0.4, 0.3, 0.15, 0.1, 0.05)]),
        (SamplingParams(top_k=3), [0.4, 0.3, 0.15, 0, 0]),
        (SamplingParams(top_p=0.8), [0.4, 0.3, 0.15, 0, 0]),
        (SamplingParams(min_p=0.25), [0.4, 0.3, 0.15, 0.1, 0]),
        (SamplingParams(min_p=0.25, top_k=3, top_p=0.8), [0.4, 0.3, 0, 0, 0]),
    ],
)
def test_samples_follow_the_distribution(params: SamplingParams, expected: list[float]) -> None:
    count = 20_000
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    rows = [make_row(i, params=params, seed=17, output_index=i) for i in range(count)]
    sampled = sample(probabilities.log().expand(count, 5).contiguous(), rows)
    counts = torch.bincount(torch.tensor(sampled.token_ids), minlength=5).double()
    wanted = torch.tensor(expected, dtype=torch.float64) / sum(expected) * count
    assert counts[wanted == 0].sum() == 0
    reached = wanted > 0
    chi_square = float(((counts - wanted)[reached] ** 2 / wanted[reached]).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: passed once in a thousand seeds


@pytest.mark.parametrize("vocab_size", [64, 70, 5000])
def test_ties_go_to_the_lowest_id(vocab_size: int) -> None:
    logits = torch.zeros(3, vocab_size)
    logits[1, [60, 9, 33]] = 2.5
    logits[2] = -torch.inf
    logits[2, [50, 20]] = 1.0
    sampled = sample(logits, [make_row(i, params=GREEDY) for i in range(3)], top_k=3)
    assert sampled.token_ids == (0, 9, 20)
    assert sampled.top_ids == (0, 1, 2, 9, 33, 60, 20, 50, 0)


def test_ties_at_the_edge_of_a_filter_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(300, 8)
    logits[:, 5] = 1.0
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.45)):
        sampled = sample(logits, [make_row(i, params=params, seed=i) for i in range(300)])
        assert set(sampled.token_ids) == {5, 0, 1}, params


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-300),
        SamplingParams(temperature=1e-6),
    ],
)
def test_extreme_values_make_sampling_greedy(params: SamplingParams) -> None:
    logits = random_logits(20, 3000)
    sampled = sample(logits, [make_row(i, params=params, seed=i) for i in range(20)])
    assert list(sampled.token_ids) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [SamplingParams(top_k=-1), SamplingParams(top_k=10**6), SamplingParams(top_k=3000)])
def test_a_top_k_that_is_off_or_beyond_the_vocabulary_changes_nothing(params: SamplingParams) -> None:
    logits = random_logits(20, 3000)
    plain = sample(logits, [make_row(i, seed=i) for i in range(20)])
    assert sample(logits, [make_row(i, params=params, seed=i) for i in range(20)]).token_ids == plain.token_ids


def test_a_high_temperature_is_nearly_uniform() -> None:
    logits = random_logits(2000, 10, seed=4)
    rows = [make_row(i, params=SamplingParams(temperature=100.0), seed=i) for i in range(2000)]
    counts = torch.bincount(torch.tensor(sample(logits, rows).token_ids), minlength=10)
    assert int(counts.min()) > 140
    assert int(counts.max()) < 260


def test_min_tokens_keeps_eos_and_stop_tokens_back_until_it_is_reached() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [2, 4, 6]] = torch.tensor([9.0, 8.0, 7.0])

    def greedy(output_index: int, **params) -> int:
        row = make_row(params=SamplingParams(temperature=0.0, min_tokens=3, **params), output_index=output_index)
        return sample(logits, [row], eos=(2, 99)).token_ids[0]

    assert [greedy(i) for i in range(5)] == [4, 4, 4, 2, 2]
    assert greedy(2, stop_token_ids=(4, 99)) == 6
    assert greedy(2, ignore_eos=True) == 2


def test_min_tokens_may_mask_the_whole_vocabulary() -> None:
    logits = random_logits(3, 4)
    for params in (
        SamplingParams(temperature=0.0, min_tokens=1),
        SamplingParams(min_tokens=1),
        SamplingParams(min_tokens=1, top_p=0.5),
    ):
        sampled = sample(logits, [make_row(i, params=params) for i in range(3)], eos=(0, 1, 2, 3))
        assert all(0 <= token_id < 4 for token_id in sampled.token_ids)


def test_a_bias_of_100_forces_or_forbids() -> None:
    logits = random_logits(2, 50)
    best = int(logits[0].argmax())
    forced = make_row(0, params=SamplingParams(logit_bias={17: 100.0}))
    forbidden = make_row(0, params=SamplingParams(temperature=0.0, logit_bias={best: -100.0}))
    sampled = sample(logits, [forced, forbidden])
    assert sampled.token_ids[0] == 17
    assert sampled.token_ids[1] == int(logits[0].topk(2).indices[1])
    # raw: the bias is not in what is recorded
    assert sampled.logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[17]), abs=1e-5)


def test_penalties_have_vllms_values() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0, 0.0]])
    # 0 was written twice: 3 - 2 * 0.5 - 0.4 = 1.6, under 2.9
    row = make_row(
        params=SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.4), output_ids=(0, 0)
    )
    assert sample(logits, [row]).token_ids == (1,)
    # the prompt counts for repetition alone: 3 / 1.5 = 2
    row = make_row(params=SamplingParams(temperature=0.0, repetition_penalty=1.5), prompt_ids=(0,))
    assert sample(logits, [row]).token_ids == (1,)
    row = make_row(params=SamplingParams(temperature=0.0, frequency_penalty=2.0), prompt_ids=(0,))
    assert sample(logits, [row]).token_ids == (0,)


def test_a_forced_token_is_taken_and_its_raw_logprob_recorded() -> None:
    logits = random_logits(1, 100)
    for params in (GREEDY, SamplingParams(top_p=0.1)):
        sampled = sample(logits, [make_row(params=params, forced_token_id=42)])
        assert sampled.token_ids == (42,)
        assert sampled.logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[42]), abs=1e-5)
        assert sampled.top_ids[0] == int(logits[0].argmax())


@pytest.mark.parametrize("top_k", [0, 1, 20])
def test_alternatives_are_the_best_tokens_with_their_raw_logprobs(top_k: int) -> None:
    logits = random_logits(5, 777)
    sampled = sample(logits, [make_row(i, params=SamplingParams(temperature=0.3)) for i in range(5)], top_k=top_k)
    best = logits.log_softmax(-1).topk(max(top_k, 1))
    assert sampled.top_k == top_k
    assert list(sampled.top_ids) == best.indices[:, :top_k].flatten().tolist()
    assert list(sampled.top_logprobs) == pytest.approx(best.values[:, :top_k].flatten().tolist(), abs=1e-5)


def test_a_vocabulary_smaller_than_top_k_gives_all_there_is() -> None:
    sampled = sample(random_logits(2, 5), [make_row(0), make_row(1)], top_k=20)
    assert sampled.top_k == 5
    assert sorted(sampled.top_ids[:5]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("k", [0, 3])
def test_prompt_scores_are_log_softmax_at_the_targets(k: int) -> None:
    logits = random_logits(200, 300)
    targets = tuple(range(50, 200))
    row = ScoreRow(first_logits_row=7, seq_id=1, target_ids=targets, k=k)
    sampled = Sampler(300, (), CPU).sample(logits, [make_row(199, params=GREEDY)], [row], 1)
    expected = logits[7:157].log_softmax(-1)
    logprobs, top_ids, top_logprobs = sampled.scores[0]
    assert list(logprobs) == pytest.approx(expected.gather(1, torch.tensor(targets)[:, None])[:, 0].tolist(), abs=1e-5)
    assert list(top_ids) == expected.topk(max(k, 1)).indices[:, :k].flatten().tolist()
    assert list(top_logprobs) == pytest.approx(expected.topk(max(k, 1)).values[:, :k].flatten().tolist(), abs=1e-5)
    assert sampled.token_ids == (int(logits[199].argmax()),)


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(8, 500)
    before = logits.clone()
    rows = [make_row(i, params=MIXED[i], prompt_ids=(1,), output_ids=(2,)) for i in range(8)]
    sample(logits, rows)
    assert torch.equal(logits, before)


def test_best_entries_are_a_stable_sorts() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (1, 5, 63, 64, 65, 1000, 4096):
        values = torch.randint(0, 30, (11, width), generator=generator).float()
        for k in {1, min(3, width), min(100, width), width}:
            expected = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
            assert torch.equal(best_entries(values, k), expected), (width, k)
    with pytest.raises(ValueError, match="between 1 and 5"):
        best_entries(torch.zeros(1, 5), 6)
