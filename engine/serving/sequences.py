"""Turns a plan into the sequences the core runs and the choices that receive their tokens. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.serving.choice_state import ChoiceState
from inferdbg.engine.serving.generation import Plan
from inferdbg.engine.serving.tokenize import Vocabulary

__all__ = ["build_sequences"]


def build_sequences(
    plan: Plan, vocabulary: Vocabulary, *, new_seq_id: Callable[[], int], top_logprobs: int, now_ns: int
) -> list[tuple[ChoiceState, SequenceRequest]]:
    """One pair per prompt and choice, prompt by prompt. The later choices of a prompt wait for the first one's prefill.

    `top_logprobs` alternatives are recorded per token at least, whatever the request asks for.
    """
    pairs: list[tuple[ChoiceState, SequenceRequest]] = []
    for prompt_index, prompt_ids in enumerate(plan.prompts):
        leader_id: int | None = None
        for choice_index in range(plan.sampling.n):
            seq_id = new_seq_id()
            # the prompt is scored once, however many choices share it
            sampling = plan.sampling if choice_index == 0 else replace(plan.sampling, prompt_logprobs=None)
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
