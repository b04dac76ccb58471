"""What a stream's documents hold, whichever choice speaks first."""

from __future__ import annotations

import pytest

from inferdbg.engine.core.events import PromptScores
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.serving.chat import ChatFormatter
from inferdbg.engine.serving.completions import CompletionFormatter
from inferdbg.engine.serving.detokenize import DetokenizerTraits
from inferdbg.engine.serving.generation import Plan
from inferdbg.engine.serving.sequences import build_sequences, prompt_seed
from inferdbg.engine.serving.tokenize import Vocabulary

PROMPT = (60, 61)


@pytest.fixture
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, DetokenizerTraits.of(tokenizer), None)


def make_plan(prompts=(PROMPT,), *, is_seeded=True, **sampling):
    return Plan(
        prompts=prompts, sampling=SamplingParams(**({"seed": 1} | sampling)), is_seeded=is_seeded, stream=True,
        include_usage=False, return_token_ids=True, cache_salt=None, messages_json=None, prompt_text=None,
    )  # fmt: skip


def build(plan, vocabulary):
    ids = iter(range(100))
    return build_sequences(plan, vocabulary, new_seq_id=lambda: next(ids), top_logprobs=0, now_ns=0)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [ChatFormatter, CompletionFormatter])
def test_the_prompts_scores_come_with_the_choice_that_has_them(vocabulary, kind, first):
    plan = make_plan(n=2, prompt_logprobs=0)
    choices = [choice for choice, _ in build(plan, vocabulary)]
    choices[0].prompt_scores = PromptScores(seq_id=0, logprobs=(-2.5,), k=0, top_ids=(), top_logprobs=())
    formatter = kind("id", 0, "m", plan, vocabulary)
    documents = []
    for choice in (choices[first], choices[1 - first]):
        choice.push_token(60, -1.0, (), (), step=1, time_ns=1, finish=None)
        documents += formatter.chunks(choice.take_delta(with_tokens=True))
    scores = [
        found
        for document in documents
        for holder in (document, *document["choices"])
        if (found := holder.get("prompt_logprobs")) is not None
    ]
    ((nothing, second),) = scores
    assert nothing is None
    assert second["61"]["logprob"] == -2.5


def test_every_prompt_has_a_seed_of_its_own_unless_the_client_gave_one(vocabulary):
    prompts = (PROMPT,) * 5
    given = [sequence.sampling.seed for _, sequence in build(make_plan(prompts, n=2), vocabulary)]
    assert given == [1] * 10
    pairs = build(make_plan(prompts, n=2, is_seeded=False), vocabulary)
    drawn = [sequence.sampling.seed for _, sequence in pairs]
    assert drawn[::2] == drawn[1::2] == [prompt_seed(1, i) for i in range(5)]
    assert len(set(drawn)) == 5
    assert [choice.sampling.seed for choice, _ in pairs] == drawn


@pytest.mark.parametrize("drawn", [0, 1, 2**63 - 1])
def test_derived_seeds_are_seeds(drawn):
    seeds = [prompt_seed(drawn, i) for i in range(1000)]
    assert seeds[0] == drawn
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
