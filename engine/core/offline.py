"""Runs sequences to their end in this process: an engine, requests in, outputs out. No server, no client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inferdbg.engine.core.engine import Engine
from inferdbg.engine.core.events import CoreEvent, FinishReason, PromptScores, StepFailed, StepRecord
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.errors import InferdbgError

__all__ = ["Output", "generate"]


@dataclass(slots=True)
class Output:
    """What became of one sequence. Alternatives are flattened, `top_k[i]` of them for token i."""

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_k: list[int] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    num_cached: int = 0  # at first admission
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


def generate(engine: Engine, requests: Iterable[SequenceRequest]) -> list[Output]:
    """Runs the requests, together with whatever else the engine has, until they have ended; in the order given.

    Their credit is renewed as they go: the caller is a client that never lags. The engine's observer hears all steps.

    Raises:
        InvalidRequest: one of them can never be run; then none is.
    """
    outputs: dict[int, Output] = {}
    events: list[CoreEvent] = []
    observer = engine.observer

    def tee(event: CoreEvent) -> None:
        events.append(event)
        observer(event)

    try:
        engine.observer = tee
        for request in requests:
            engine.add(request)
            outputs[request.seq_id] = Output(request.seq_id)
        while any(output.finish_reason is None for output in outputs.values()):
            if not engine.step():
                raise InferdbgError("sequences are unfinished and the engine has nothing to do")
            for event in events:
                _take(engine, outputs, event)
            events.clear()
    finally:
        engine.observer = observer
        engine.abort(seq_id for seq_id, output in outputs.items() if output.finish_reason is None)
    return list(outputs.values())


def _take(engine: Engine, outputs: dict[int, Output], event: CoreEvent) -> None:
    match event:
        case StepRecord():
            _take_tokens(engine, outputs, event)
            for scores in event.prompt_scores:
                if scores.seq_id in outputs:
                    outputs[scores.seq_id].prompt_scores = scores
            admissions = zip(event.admitted_seq_ids, event.admitted_cached, event.admitted_is_resume, strict=True)
            for seq_id, num_cached, is_resume in admissions:
                if seq_id in outputs and not is_resume:
                    outputs[seq_id].num_cached = num_cached
            for seq_id in event.preempted_seq_ids:
                if seq_id in outputs:
                    outputs[seq_id].num_preemptions += 1
            for seq_id, reason in zip(event.finished_seq_ids, event.finished_reasons, strict=True):
                if seq_id in outputs:
                    outputs[seq_id].finish_reason = reason
        case StepFailed():
            for seq_id in event.seq_ids:
                if seq_id in outputs:
                    outputs[seq_id].finish_reason = FinishReason.ERROR
                    outputs[seq_id].error = event.error


def _take_tokens(engine: Engine, outputs: dict[int, Output], record: StepRecord) -> None:
    k = record.sampled_top_k
    for i, seq_id in enumerate(record.sampled_seq_ids):
        output = outputs.get(seq_id)
        if output is None:
            continue
        output.token_ids.append(record.sampled_ids[i])
        output.logprobs.append(record.sampled_logprobs[i])
        output.top_k.append(k)
        output.top_ids += record.sampled_top_ids[i * k : (i + 1) * k]
        output.top_logprobs += record.sampled_top_logprobs[i * k : (i + 1) * k]
        engine.add_credit(seq_id, 1)
