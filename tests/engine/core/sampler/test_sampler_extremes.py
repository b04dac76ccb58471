"""Whatever valid parameters meet whatever finite logits, a token comes out; and a row of no use is told from others."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import make_row

from inferdbg.engine.core.runner import RowsFailed, ScoreRow
from inferdbg.engine.core.sampler.sampler import Sampler
from inferdbg.engine.core.sampling_params import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, SamplingParams
from inferdbg.engine.errors import InvalidRequest

CPU = torch.device("cpu")
EOS = (1, 3)
VOCAB_SIZES = st.sampled_from([1, 2, 5, 63, 64, 65, 200])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])
FP32_MAX = torch.finfo(torch.float32).max


def between(low: float, high: float, *usual: float) -> st.SearchStrategy[float]:
    """Any value of a closed range, its ends and the usual ones often."""
    return st.sampled_from([low, high, *usual]) | st.floats(low, high)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    min_tokens=st.sampled_from([0, 0, 8]),
    temperature=between(0.0, 100.0, 1.0, 5e-324, 1e-38),
    top_p=between(5e-324, 1.0, 1.0, 0.9),
    top_k=st.sampled_from([0, -1, 1, 5, 64, 10**9]),
    min_p=between(0.0, 1.0, 0.0, 0.05),
    repetition_penalty=between(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, 1.0),
    presence_penalty=between(-2.0, 2.0, 0.0),
    frequency_penalty=between(-2.0, 2.0, 0.0),
    logit_bias=st.dictionaries(st.integers(0, 70), between(-100.0, 100.0), max_size=3),
    stop_token_ids=st.sampled_from([(), (0, 2), tuple(range(200))]),
    ignore_eos=st.booleans(),
)


@st.composite
def extreme_logits(draw: st.DrawFn, num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of usual, huge, tiny, equal and impossible (-inf) logits; each has a finite one."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    largest = min(FP32_MAX, torch.finfo(dtype).max)
    scale = draw(st.sampled_from([0.0, 1e-40, 1.0, 30.0, 1e4, 1e30, largest / 8]))
    logits = (torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64) * scale).to(dtype)
    logits.clamp_(-largest, largest)
    edges = st.sampled_from([largest, -largest, -math.inf, 0.0, 1e-45])
    for row in range(num_rows):
        for column in draw(st.lists(st.integers(0, vocab_size - 1), max_size=4)):
            logits[row, column] = draw(edges)
        if bool(logits[row].isneginf().all()):
            logits[row, draw(st.integers(0, vocab_size - 1))] = draw(st.sampled_from([largest, -largest, 0.0]))
    return logits


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_valid_parameters_over_any_finite_logits_sample_a_token(data: st.DataObject) -> None:
    vocab_size, num_rows = data.draw(VOCAB_SIZES), data.draw(st.integers(1, 4))
    logits = data.draw(extreme_logits(num_rows, vocab_size, data.draw(DTYPES)))
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=20).map(tuple)
    rows = [
        make_row(
            i,
            params=data.draw(PARAMS),
            seed=data.draw(st.integers(-(2**63), 2**63 - 1)),
            output_index=data.draw(st.integers(0, 9)),
            prompt_ids=data.draw(ids),
            output_ids=data.draw(ids),
        )
        for i in range(num_rows)
    ]
    score = ScoreRow(first_logits_row=0, seq_id=0, target_ids=(0,) * num_rows, k=data.draw(st.integers(0, 20)))
    sampled = Sampler(vocab_size, EOS, CPU).sample(logits, rows, [score], data.draw(st.integers(0, 20)))
    assert len(sampled.token_ids) == num_rows
    assert all(0 <= token_id < vocab_size for token_id in (*sampled.token_ids, *sampled.top_ids))
    assert not any(math.isnan(x) for x in (*sampled.logprobs, *sampled.top_logprobs, *sampled.scores[0][0]))
    for row, token_id in zip(rows, sampled.token_ids, strict=True):  # a token the model rules out is never sampled …
        ruled_out = logits[row.logits_row].isneginf()
        ends = set(row.params.stop_token_ids) | (set() if row.params.ignore_eos else set(EOS))
        if row.output_index < row.params.min_tokens:
            ruled_out[[i for i in ends if i < vocab_size]] = True
        if not bool(ruled_out.all()):  # … unless nothing else is left
            assert not bool(ruled_out[token_id]), row.params


def test_a_penalty_that_overflows_makes_its_token_the_best_and_leaves_the_others_alone() -> None:
    logits = torch.tensor([[2e38, 1e38, 0.0], [0.0, 5.0, -60.0]])
    strong = SamplingParams(repetition_penalty=0.01, temperature=1.0)
    rows = [make_row(0, params=strong, prompt_ids=(1,)), make_row(1, params=SamplingParams(temperature=0.0))]
    assert Sampler(3, (), CPU).sample(logits, rows, [], 1).token_ids == (1, 1)


@pytest.mark.parametrize("value", [1e-38, 0.0099, 100.1, 1e4])
def test_a_repetition_penalty_beyond_use_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"repetition_penalty must lie in \[0\.01, 100\.0\]") as refused:
        SamplingParams(repetition_penalty=value)
    assert refused.value.param == "repetition_penalty"


def test_prompt_scores_of_a_small_vocabulary_have_all_there_is() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    row = ScoreRow(first_logits_row=0, seq_id=1, target_ids=(4, 2, 0), k=20)
    ((logprobs, top_ids, top_logprobs),) = Sampler(5, (), CPU).sample(logits, [], [row], 0).scores
    assert (len(logprobs), len(top_ids), len(top_logprobs)) == (3, 15, 15)
    assert list(top_ids) == logits.argsort(dim=-1, descending=True).flatten().tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_the_sequences_whose_logits_are_not_numbers_are_named_and_no_others(bad: float | str) -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    for row in (1, 3):
        logits[row] = -math.inf
        if isinstance(bad, float):
            logits[row] = 0.0
            logits[row, 50] = bad
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=5)]
    rows = [make_row(i, params=params[i % 3], seq_id=70 + i) for i in range(5)]
    with pytest.raises(RowsFailed, match="sequences 71, 73;") as failed:
        Sampler(100, (), CPU).sample(logits, rows, [], 1)
    assert failed.value.seq_ids == (71, 73)
    score = ScoreRow(first_logits_row=0, seq_id=9, target_ids=(1, 2), k=1)
    with pytest.raises(RowsFailed, match="sequence 9;") as failed:
        Sampler(100, (), CPU).sample(logits, rows[:1], [score], 0)
    assert failed.value.seq_ids == (9,)
