"""Puts what a step did into one columnar record and tells the observer: the core's only telemetry.
Decides nothing, and keeps only facts that have not been told yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inferdbg.engine.core.batch import PreparedStep
from inferdbg.engine.core.cache.kv import KVCacheManager
from inferdbg.engine.core.events import CoreEvent, CoreObserver, FinishReason, PromptScores, StepFailed, StepRecord
from inferdbg.engine.core.runner import SampledTokens
from inferdbg.engine.core.scheduler.decision import Admission, Preemption, ScheduleDecision
from inferdbg.engine.core.scheduler.scheduler import Scheduler
from inferdbg.engine.core.stages import StageTimes

__all__ = ["Recorder", "StepResult"]

MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class StepResult:
    """All that a step's stages made."""

    decision: ScheduleDecision
    prepared: PreparedStep
    graph_bucket: int | None
    tokens: SampledTokens
    prompt_scores: tuple[PromptScores, ...]


class Recorder:
    """Ends, admissions and preemptions are noted when they happen and told with the next record, be it that of a later
    step: an abort comes between steps, and the step of an admission or a preemption may fail.
    """

    def __init__(self, observer: CoreObserver, clock: Callable[[], int], token_budget: int) -> None:
        self.observer = observer
        self.num_steps = 0
        self._clock = clock
        self._token_budget = token_budget
        self._finished: dict[int, FinishReason] = {}
        self._admitted: list[Admission] = []
        self._preempted: list[Preemption] = []
        self._num_evicted = 0  # as of the last record
        self._last_end_ns = clock()
        self._handoff_ns = 0

    @property
    def has_ends_to_tell(self) -> bool:
        return bool(self._finished)

    def note_finished(self, seq_id: int, reason: FinishReason) -> None:
        self._finished[seq_id] = reason

    def note_scheduled(self, decision: ScheduleDecision) -> None:
        self._admitted += decision.admitted
        self._preempted += decision.preempted

    def tell(self, event: CoreEvent) -> None:
        """The one place where the core states what happened."""
        self._last_end_ns = event.end_ns if isinstance(event, StepRecord) else event.time_ns
        before = self._clock()
        self.observer(event)
        self._handoff_ns = self._clock() - before

    def failure(self, stage: str, error: Exception, seq_ids: tuple[int, ...]) -> StepFailed:
        """A step that raised. `seq_ids` failed, whatever was noted for them in that step."""
        for seq_id in seq_ids:
            self._finished.pop(seq_id, None)
        self._admitted = [a for a in self._admitted if a.seq_id not in seq_ids]
        self.num_steps += 1
        return StepFailed(
            step=self.num_steps - 1,
            time_ns=self._clock(),
            stage=stage,
            error=f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS],
            seq_ids=seq_ids,
        )

    def record(self, result: StepResult, scheduler: Scheduler, kv: KVCacheManager, stages: StageTimes) -> StepRecord:
        """The record of a step whose last stage is about to end."""
        decision, tokens = result.decision, result.tokens
        waits = scheduler.waits(decision.blocked_by)
        record = StepRecord(
            step=self.num_steps,
            start_ns=stages.start_ns,
            idle_ns=stages.start_ns - self._last_end_ns,
            handoff_ns=self._handoff_ns,
            schedule_ns=stages.times["schedule"],
            prepare_ns=stages.times["prepare"],
            execute_ns=stages.times["execute"],
            sample_ns=stages.times["sample"],
            chunk_seq_ids=tuple(seq.seq_id for seq in decision.seqs),
            chunk_starts=decision.starts,
            chunk_lens=decision.lens,
            chunk_is_prefill=(False,) * decision.num_decodes + (True,) * (len(decision.seqs) - decision.num_decodes),
            sampled_seq_ids=tuple(seq.seq_id for seq in result.prepared.sampled),
            sampled_ids=tokens.token_ids,
            sampled_logprobs=tokens.logprobs,
            sampled_top_k=tokens.top_k,
            sampled_top_ids=tokens.top_ids,
            sampled_top_logprobs=tokens.top_logprobs,
            prompt_scores=result.prompt_scores,
            admitted_seq_ids=tuple(a.seq_id for a in self._admitted),
            admitted_cached=tuple(a.num_cached for a in self._admitted),
            admitted_is_resume=tuple(a.is_resume for a in self._admitted),
            preempted_seq_ids=tuple(p.seq_id for p in self._preempted),
            preempted_lost=tuple(p.num_lost for p in self._preempted),
            finished_seq_ids=tuple(self._finished),
            finished_reasons=tuple(self._finished.values()),
            num_running=len(scheduler.running),
            waiting_reasons=waits.reasons,
            waiting_requests=waits.requests,
            waiting_tokens=waits.tokens,
            oldest_waiting_ns=waits.oldest_ns,
            token_budget=self._token_budget,
            pages_free=kv.num_free,
            pages_used=kv.num_used,
            pages_cached=kv.num_cached,
            prefix_queried_tokens=sum(a.num_queried for a in self._admitted),
            prefix_hit_tokens=sum(a.num_cached for a in self._admitted),
            evicted_pages=kv.num_evicted - self._num_evicted,
            graph_bucket=result.graph_bucket,
            publish_ns=stages.elapsed(),
        )
        self._finished, self._admitted, self._preempted, self._num_evicted = {}, [], [], kv.num_evicted
        self.num_steps += 1
        return record
