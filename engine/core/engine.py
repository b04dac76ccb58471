"""The engine: takes sequences, turns the step loop, states what happened. Torch-free.

It knows neither the model (a `Runner` computes) nor the clients (an observer hears one event per step). The rules of
who runs are the scheduler's, those of pages the cache manager's; here are the order of the stages and the rules that
end a sequence. Called from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.admission import check_request, context_length
from inferdbg.engine.core.batch import PreparedStep, prepare
from inferdbg.engine.core.cache.kv import KVCacheManager
from inferdbg.engine.core.events import CoreEvent, CoreObserver, FinishReason, PromptScores, StepFailed, StepRecord
from inferdbg.engine.core.model_info import ModelInfo
from inferdbg.engine.core.recorder import Recorder, StepResult
from inferdbg.engine.core.runner import RowsFailed, Runner, SampledTokens
from inferdbg.engine.core.scheduler.decision import ScheduleDecision
from inferdbg.engine.core.scheduler.policy import make_policy
from inferdbg.engine.core.scheduler.scheduler import Scheduler
from inferdbg.engine.core.scores import ScoreBook
from inferdbg.engine.core.sequence import Sequence, SequenceRequest
from inferdbg.engine.core.stages import StageTimes

__all__ = ["Engine"]

NOTHING_SAMPLED = SampledTokens(token_ids=(), logprobs=(), top_k=0, top_ids=(), top_logprobs=())


class Engine:
    """One core. Sequences go in by `add`; what becomes of them is told to `observer`, once per `step`.

    Args:
        num_pages: KV pages the runner has memory for.
        clock: monotonic ns.

    Raises:
        UsageError: the configuration does not fit the model.
    """

    def __init__(
        self,
        config: CoreConfig,
        model: ModelInfo,
        runner: Runner,
        observer: CoreObserver,
        *,
        num_pages: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._config = config
        self._model = model
        self._context = context_length(config, model)
        self._runner = runner
        self._clock = clock
        self._kv = KVCacheManager(num_pages, config.page_size, prefix_cache=config.prefix_cache)
        self._scheduler = Scheduler(
            self._kv, make_policy(config.policy), max_num_seqs=config.max_num_seqs, token_budget=config.token_budget
        )
        self._scores = ScoreBook()
        self._recorder = Recorder(observer, clock, config.token_budget)

    @property
    def observer(self) -> CoreObserver:
        """Hears of every step, on the thread that steps; must not block and must not throw."""
        return self._recorder.observer

    @observer.setter
    def observer(self, observer: CoreObserver) -> None:
        self._recorder.observer = observer

    @property
    def num_steps(self) -> int:
        """Steps told so far, failed ones included."""
        return self._recorder.num_steps

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that every sequence can have: the context, or what all pages hold."""
        return min(self._context, self._kv.num_pages * self._kv.page_size)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do. Sequences paused for want of credit are no work."""
        return self._scheduler.has_work or self._recorder.has_ends_to_tell

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Live sequences that do not run, the paused ones included."""
        return self._scheduler.num_live - self.num_running

    def add(self, request: SequenceRequest) -> None:
        """Takes a sequence; it is admitted by one of the next steps.

        Raises:
            InvalidRequest: it can never be run; `ContextLengthExceeded` where it is too long.
        """
        max_total = check_request(
            request.prompt_ids,
            request.sampling,
            vocab_size=self._model.vocab_size,
            max_model_len=self.max_model_len,
        )
        if self._scheduler.get(request.seq_id) is not None:
            raise ValueError(f"seq_id {request.seq_id} is in use")
        self._scheduler.add(
            Sequence.from_request(
                request,
                self._config.client_credit,
                max_total=max_total,
                eos_token_ids=self._model.eos_token_ids,
            )
        )

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences nobody waits for and frees their pages; the next step's record says so.

        Unknown and finished ids are ignored.
        """
        for seq_id in seq_ids:
            seq = self._scheduler.get(seq_id)
            if seq is not None:
                self._end(seq, FinishReason.ABORT)

    def add_credit(self, seq_id: int, tokens: int) -> None:
        """Lets a sequence be `tokens` further ahead of its client. Unknown and finished ids are ignored."""
        seq = self._scheduler.get(seq_id)
        if seq is not None:
            self._scheduler.add_credit(seq, tokens)

    def step(self) -> bool:
        """Runs one step and tells the observer of it; False, and nothing told, if there was nothing to do."""
        if not self.has_work:
            return False
        decision = ScheduleDecision()
        stages = StageTimes(self._clock)
        event: CoreEvent
        try:
            decision = stages.run("schedule", self._schedule)
            prepared = stages.run("prepare", self._prepare, decision)
            bucket = stages.run("execute", self._execute, prepared)
            tokens = stages.run("sample", self._sample, prepared)
            event = stages.run("publish", self._publish, decision, prepared, bucket, tokens, stages)
        except Exception as error:
            event = self._fail(stages.current, error, decision)
        self._recorder.tell(event)
        return True

    def check_integrity(self) -> None:
        """Checks that no page and no sequence is lost or in two places. Linear in pages: for tests and idle moments.

        Raises:
            InferdbgError: a fault of ours; the message says which.
        """
        self._kv.check_integrity()
        self._scheduler.check_integrity()

    def _schedule(self) -> ScheduleDecision:
        decision = self._scheduler.schedule()
        self._recorder.note_scheduled(decision)
        for preemption in decision.preempted:
            self._scores.drop(preemption.seq_id)
        return decision

    def _prepare(self, decision: ScheduleDecision) -> PreparedStep:
        return prepare(decision, self._config.page_size, self._config.top_logprobs)

    def _execute(self, prepared: PreparedStep) -> int | None:
        return self._runner.execute(prepared.batch) if len(prepared.batch.token_ids) else None

    def _sample(self, prepared: PreparedStep) -> SampledTokens:
        if not prepared.rows and not prepared.scores:
            return NOTHING_SAMPLED
        return self._runner.sample(prepared.rows, prepared.scores, prepared.top_k)

    def _publish(
        self,
        decision: ScheduleDecision,
        prepared: PreparedStep,
        bucket: int | None,
        tokens: SampledTokens,
        stages: StageTimes,
    ) -> StepRecord:
        self._keep_computed(decision)
        scores = self._keep_scores(prepared, tokens)
        for seq, token_id in zip(prepared.sampled, tokens.token_ids, strict=True):
            self._append(seq, token_id)
        result = StepResult(decision, prepared, bucket, tokens, scores)
        return self._recorder.record(result, self._scheduler, self._kv, stages)

    def _keep_computed(self, decision: ScheduleDecision) -> None:
        """The chunks' KV is in the pages now; a prefill that is complete is put into the prefix cache."""
        for i, seq in enumerate(decision.seqs):
            seq.num_computed += decision.lens[i]
            if i >= decision.num_decodes and seq.num_to_compute == 0:
                self._kv.publish(seq)

    def _keep_scores(self, prepared: PreparedStep, tokens: SampledTokens) -> tuple[PromptScores, ...]:
        """Adds this step's prompt scores; returns those of the sequences whose prefill ended."""
        for row, scored in zip(prepared.scores, tokens.scores, strict=True):
            self._scores.add(row, scored)
        return tuple(self._scores.take(seq.seq_id) for seq in prepared.sampled if seq.needs_prompt_scores)

    def _append(self, seq: Sequence, token_id: int) -> None:
        """Appends a sampled token, and ends or pauses the sequence if that was its last for now."""
        seq.token_ids.append(token_id)
        seq.credit -= 1
        if seq.num_output == 1:
            self._scheduler.prefill_done(seq)
        reason = _end_reason(seq, token_id)
        if reason is not None:
            self._end(seq, reason)
        elif seq.credit <= 0:
            self._scheduler.pause(seq)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        self._scheduler.remove(seq, publish=True)
        self._scores.drop(seq.seq_id)
        self._recorder.note_finished(seq.seq_id, reason)

    def _fail(self, stage: str, error: Exception, decision: ScheduleDecision) -> StepFailed:
        """Ends the sequences of a step that raised; what they computed in it is not to be trusted.

        Where the runner names those at fault, only these are ended: nothing was appended to the others yet, so that
        they compute the same chunks again in the next step.
        """
        seqs = list(decision.seqs) if decision.seqs else self._scheduler.suspects()
        if isinstance(error, RowsFailed):
            seqs = [seq for seq in seqs if seq.seq_id in error.seq_ids] or seqs
        for seq in seqs:
            if self._scheduler.get(seq.seq_id) is seq:
                self._scheduler.remove(seq, publish=False)
            self._scores.drop(seq.seq_id)
        return self._recorder.failure(stage, error, tuple(seq.seq_id for seq in seqs))


def _end_reason(seq: Sequence, token_id: int) -> FinishReason | None:
    """Whether the token just sampled ends its sequence. A stop at the very limit counts as a stop.

    The sampler masks stops while fewer than min_tokens are there; the rule stands here too, as the one that decides.
    """
    sampling = seq.request.sampling
    if token_id in seq.stop_ids and seq.num_output > sampling.min_tokens:
        return FinishReason.STOP
    if len(seq.token_ids) >= seq.max_total:
        return FinishReason.LENGTH if sampling.forced_token_ids is None else FinishReason.FORCED
    return None
