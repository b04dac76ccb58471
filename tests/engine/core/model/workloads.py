"""Random seeded workloads, and a driver that runs one on a real engine: staggered arrivals, aborts, a watched end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, info_of
from transformers import PreTrainedModel

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.engine import Engine
from inferdbg.engine.core.events import CoreEvent, FinishReason, StepFailed, StepRecord
from inferdbg.engine.core.model.build import build_engine_on
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.core.sequence import SequenceRequest

EOS = frozenset({2})


@dataclass(frozen=True)
class Planned:
    """A sequence, the step before which it arrives, and the number of outputs after which it is aborted."""

    request: SequenceRequest
    arrival: int
    abort_after: int | None


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[int, float]] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass
class Totals:
    """What happened on the way, so that a test can say that it did."""

    preemptions: int = 0
    cached_tokens: int = 0
    mixed_steps: int = 0  # with decodes and prefill chunks
    chunked: int = 0  # prefill chunks that did not begin at 0
    buckets: set[int | None] = field(default_factory=set)


def random_plan(seed: int, num_requests: int = 7, *, sampled: bool = False, aborts: bool = True) -> list[Planned]:
    """Requests that share prefixes, some with two or three choices, arriving over the first steps."""
    rng = random.Random(seed)
    prefixes = [_ids(rng, rng.randint(5, 30)) for _ in range(2)]
    plan: list[Planned] = []
    while len(plan) < num_requests:
        prompt = rng.choice([[], *prefixes]) + _ids(rng, rng.randint(1, 12))
        arrival = rng.randint(0, 12)
        num_choices = rng.choice([1, 1, 1, 2, 3])
        leader_id = len(plan)
        for choice in range(num_choices):
            sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "temperature": 0.0, "n": num_choices}
            if sampled and rng.random() < 0.7:
                sampling |= {"temperature": rng.choice([0.7, 1.0, 1.5]), "seed": rng.randint(0, 999)}
                sampling |= rng.choice([{}, {"prompt_logprobs": 2}])
                sampling |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.1}])
            request = SequenceRequest(
                seq_id=len(plan),
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(**sampling),
                choice_index=choice,
                leader_id=leader_id if choice else None,
            )
            abort_after = rng.randint(0, 8) if aborts and rng.random() < 0.2 else None
            plan.append(Planned(request, arrival, abort_after))
    return plan


def random_config(seed: int, plan: list[Planned], **fixed: Any) -> CoreConfig:
    """Odd sizes, and hardly more pages than the longest sequence needs, so that others are preempted."""
    rng = random.Random(seed + 10_000)
    page_size = rng.choice([1, 2, 3, 5, 8, 16, 33, 64])
    longest = max(len(p.request.prompt_ids) + p.request.sampling.max_tokens for p in plan)
    max_num_seqs = rng.randint(2, 8)
    values: dict[str, Any] = {
        "model_dir": Path(),
        "dtype": "float64",
        "page_size": page_size,
        "num_pages": -(-longest // page_size) + rng.choice([0, 1, 2]),
        "max_num_seqs": max_num_seqs,
        "token_budget": max(max_num_seqs, rng.choice([1, 4, 7, 16, 64])),
        "fast_path": "off",
        "top_logprobs": 2,
    }
    return CoreConfig(**(values | fixed))


def run_plan(model: PreTrainedModel, config: CoreConfig, plan: list[Planned]) -> tuple[dict[int, Outcome], Totals]:
    """Runs a plan to its end; raises what a step raised."""
    events: list[CoreEvent] = []
    engine, _ = build_engine_on(config, events.append, model, info_of(model, EOS))
    outcomes = {planned.request.seq_id: Outcome() for planned in plan}
    aborts = {p.request.seq_id: p.abort_after for p in plan if p.abort_after is not None}
    totals = Totals()
    waiting = sorted(plan, key=lambda planned: planned.arrival)
    turn = 0
    while waiting or any(outcome.finish_reason is None for outcome in outcomes.values()):
        while waiting and waiting[0].arrival <= turn:
            engine.add(waiting.pop(0).request)
        turn += 1
        engine.step()
        engine.check_integrity()
        for event in events:
            assert not isinstance(event, StepFailed), event.error
            _take(event, outcomes, totals)
        events.clear()
        live = {p.request.seq_id for p in plan} - {p.request.seq_id for p in waiting}
        engine.abort([i for i in live if i in aborts and len(outcomes[i].token_ids) >= aborts[i]])
        assert turn < 3000, "the workload does not end"
    _check_nothing_leaked(engine, events)
    return outcomes, totals


def _take(record: StepRecord, outcomes: dict[int, Outcome], totals: Totals) -> None:
    k = record.sampled_top_k
    for i, seq_id in enumerate(record.sampled_seq_ids):
        outcome = outcomes[seq_id]
        outcome.token_ids.append(record.sampled_ids[i])
        outcome.logprobs.append(record.sampled_logprobs[i])
        here = slice(i * k, (i + 1) * k)
        outcome.top += zip(record.sampled_top_ids[here], record.sampled_top_logprobs[here], strict=True)
    for scores in record.prompt_scores:
        outcomes[scores.seq_id].prompt_logprobs = scores.logprobs + scores.top_logprobs
    for seq_id, reason in zip(record.finished_seq_ids, record.finished_reasons, strict=True):
        outcomes[seq_id].finish_reason = reason
    totals.preemptions += len(record.preempted_seq_ids)
    totals.cached_tokens += sum(record.admitted_cached)
    totals.mixed_steps += len(set(record.chunk_is_prefill)) == 2
    chunks = zip(record.chunk_starts, record.chunk_is_prefill, strict=True)
    totals.chunked += sum(is_prefill and start > 0 for start, is_prefill in chunks)
    if record.chunk_seq_ids:
        totals.buckets.add(record.graph_bucket)


def _check_nothing_leaked(engine: Engine, events: list[CoreEvent]) -> None:
    engine.step()
    assert engine.num_running == 0
    assert engine.num_waiting == 0
    assert not any(isinstance(event, StepRecord) and event.pages_used for event in events)


def reference_outputs(model: PreTrainedModel, plan: list[Planned]) -> dict[int, list[int]]:
    """What transformers' own `generate` says, greedily, one sequence at a time."""
    longest: dict[tuple[int, ...], int] = {}
    for planned in plan:
        prompt = planned.request.prompt_ids
        longest[prompt] = max(longest.get(prompt, 0), planned.request.sampling.max_tokens)
    generated = {}
    for prompt, num_tokens in longest.items():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=list(EOS)
        )
        generated[prompt] = out[0, len(prompt) :].tolist()
    return {p.request.seq_id: generated[p.request.prompt_ids][: p.request.sampling.max_tokens] for p in plan}


def _ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num)]
