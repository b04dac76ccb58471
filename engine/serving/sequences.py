"""Turns a plan into the sequences the core runs and the choices that receive their tokens. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.serving.choice_state import ChoiceState
from inferdbg.engine.serving.generation import Plan
from inferdbg.engine.serving.tokenize import Vocabulary

__all__ = ["build_sequences", "prompt_seed"]


_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def prompt_seed(drawn: int, prompt_index: int) -> int:
    """The seed of one prompt of a request that gave none: equal prompts must not get equal samples.

    The drawn seed for the first, splitmix64 of it (Steele, Lea and Flood 2014) at the prompt's index for the others.
    """
    if prompt_index == 0:
        return drawn
    z = (drawn + prompt_index * _GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1  # seeds are signed


def build_sequences(
    plan: Plan, vocabulary: Vocabulary, *, new_seq_id: Callable[[], int], top_logprobs: int, now_ns: int
) -> list[tuple[ChoiceState, SequenceRequest]]:
    """One pair per prompt and choice, prompt by prompt. The later choices of a prompt wait for the first one's prefill.

    A seed the client gave is that of every prompt. `top_logprobs` alternatives are recorded per token at least,
    whatever the request asks for.
    """
    pairs: list[tuple[ChoiceState, SequenceRequest]] = []
    for prompt_index, prompt_ids in enumerate(plan.prompts):
        leader_id: int | None = None
        leading = plan.sampling
        if not plan.is_seeded:
            assert leading.seed is not None
            leading = replace(leading, seed=prompt_seed(leading.seed, prompt_index))
        following = replace(leading, prompt_logprobs=None) if plan.sampling.n > 1 else leading
        for choice_index in range(plan.sampling.n):
            seq_id = new_seq_id()
            # the prompt is scored once, however many choices share it
            sampling = leading if choice_index == 0 else following
            choice = ChoiceState(
                prompt_index=prompt_index,
                choice_index=choice_index,
                seq_id=seq_id,
                sampling=sampling,
                detokenizer=vocabulary.detokenizer(skip_special_tokens=sampling.skip_special_tokens),
                top_k=max(top_logprobs, sampling.logprobs or 0),
            )
            sequence = SequenceRequest(
                seq_id=seq_id,
                prompt_ids=prompt_ids,
                sampling=sampling,
                choice_index=choice_index,
                leader_id=leader_id,
                cache_salt=plan.cache_salt,
                arrival_ns=now_ns,
            )
            pairs.append((choice, sequence))
            leader_id = seq_id if leader_id is None else leader_id
    return pairs
