"""Connects requests with sequences: submits them to the core, hands each step's tokens to their choices.

One instance per front; sequence ids go on ascending over restarts of the core. Knows nothing of HTTP or processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from inferdbg.engine.core.events import FinishReason, StepFailed, StepRecord
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.serving.choice_state import ChoiceState
from inferdbg.engine.serving.events import EndKind
from inferdbg.engine.serving.messages import Abort, Credit, FrontMessage, Refused, Submit
from inferdbg.engine.serving.request_state import Failure, RequestState

__all__ = ["Dispatcher"]


class Dispatcher:
    """Owns the map from sequence id to choice. An id leaves it when its choice ends; what comes after that is late."""

    def __init__(
        self,
        send: Callable[[FrontMessage], None],
        client_credit: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._send = send
        self._client_credit = client_credit
        self._credit_quantum = max(1, client_credit // 4)  # grants are gathered: one message for many tokens
        self._clock = clock
        self._live: dict[int, tuple[RequestState, ChoiceState]] = {}
        self._next_seq_id = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def has_runnable(self) -> bool:
        """Whether the core owes a step: some sequence has not ended and may still send tokens."""
        return any(choice.credit_left > 0 for _, choice in self._live.values())

    def new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def submit(self, request: RequestState, sequences: Sequence[SequenceRequest]) -> None:
        """Sends the sequences of an accepted request to the core; they are parallel to its choices."""
        for choice in request.choices:
            choice.credit_left = self._client_credit
            self._live[choice.seq_id] = (request, choice)
        self._send(Submit(list(sequences)))

    def abort(self, request: RequestState) -> None:
        """Frees the pages of all its sequences in the core's next step; its choices take no more tokens."""
        seq_ids = [choice.seq_id for choice in request.choices if self._live.pop(choice.seq_id, None) is not None]
        if seq_ids:
            self._send(Abort(seq_ids))

    def grant(self, choice: ChoiceState) -> None:
        """The client took tokens: the core may send as many again. Told to the core in lots."""
        owed = choice.num_taken - choice.num_granted
        if owed >= self._credit_quantum and choice.seq_id in self._live:
            self._send(Credit(choice.seq_id, owed))
            choice.credit_left += owed
            choice.num_granted += owed

    def on_step(self, record: StepRecord) -> None:
        """Moves a step's facts into the choices they concern."""
        now = self._clock()
        scheduled = record.start_ns + record.schedule_ns
        self._note_admissions(record, scheduled)
        for scores in record.prompt_scores:
            if entry := self._live.get(scores.seq_id):
                entry[1].prompt_scores = scores
        finished = dict(zip(record.finished_seq_ids, record.finished_reasons, strict=True))
        last_index = {seq_id: i for i, seq_id in enumerate(record.sampled_seq_ids)}
        k = record.sampled_top_k
        for i, seq_id in enumerate(record.sampled_seq_ids):
            entry = self._live.get(seq_id)
            if entry is None:
                continue  # the client left, or a stop string was found, while this token was on its way
            request, choice = entry
            begun = self._clock()
            choice.push_token(
                record.sampled_ids[i],
                record.sampled_logprobs[i],
                record.sampled_top_ids[i * k : (i + 1) * k],
                record.sampled_top_logprobs[i * k : (i + 1) * k],
                step=record.step,
                time_ns=now,
                finish=finished.get(seq_id) if last_index[seq_id] == i else None,
            )
            self._after_token(request, choice, begun, core_ended=seq_id in finished)
        for seq_id, reason in finished.items():
            if entry := self._live.get(seq_id):  # ended without a token of its own
                self._end_without_token(*entry, reason)

    def on_failed(self, failure: StepFailed) -> None:
        """A step raised: the requests of its sequences fail, with all their choices."""
        for seq_id in failure.seq_ids:
            if entry := self._live.get(seq_id):
                self._fail(entry[0], 500, "engine_error", f"the engine failed in {failure.stage}: {failure.error}")

    def on_refused(self, refused: Refused) -> None:
        """The core cannot run a sequence at all: its request is rejected."""
        if entry := self._live.pop(refused.seq_id, None):
            request = entry[0]
            self.abort(request)
            request.fail(
                Failure(end=EndKind.REJECTED, status=400, code="context_length_exceeded", message=refused.message)
            )

    def lose_core(self, reason: str) -> None:
        """The core is gone: every request in flight fails."""
        requests = {id(request): request for request, _ in self._live.values()}
        self._live.clear()
        for request in requests.values():
            request.fail(Failure(end=EndKind.FAILED, status=503, code="engine_lost", message=reason))

    def live_requests(self) -> list[RequestState]:
        """Requests with a sequence in the core, oldest first."""
        return list({id(request): request for request, _ in self._live.values()}.values())

    def _note_admissions(self, record: StepRecord, scheduled_ns: int) -> None:
        for seq_id, cached in zip(record.admitted_seq_ids, record.admitted_cached, strict=True):
            if entry := self._live.get(seq_id):
                entry[1].admit(cached, scheduled_ns)
        for seq_id in record.preempted_seq_ids:
            if entry := self._live.get(seq_id):
                entry[1].preempt(scheduled_ns)

    def _after_token(self, request: RequestState, choice: ChoiceState, begun_ns: int, *, core_ended: bool) -> None:
        ready = self._clock()
        request.detokenize_ns += ready - begun_ns
        if choice.first_text_ns is None and choice.has_text:
            choice.first_text_ns = ready
        if choice.is_done:
            choice.text_ready_ns = ready
            del self._live[choice.seq_id]
            if not core_ended:  # a stop string: the core does not know it yet
                self._send(Abort([choice.seq_id]))
        elif not request.is_streaming:  # nobody is slower than the front here
            choice.num_taken = choice.num_output
            self.grant(choice)
        request.wake.set()

    def _end_without_token(self, request: RequestState, choice: ChoiceState, reason: FinishReason) -> None:
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH | FinishReason.FORCED:
                choice.finish(reason)
                choice.text_ready_ns = self._clock()
                del self._live[choice.seq_id]
                request.wake.set()
            case FinishReason.ERROR | FinishReason.ABORT:
                self._fail(request, 500, "engine_error", "the engine ended the request without finishing it")

    def _fail(self, request: RequestState, status: int, code: str, message: str) -> None:
        self.abort(request)
        request.fail(Failure(end=EndKind.FAILED, status=status, code=code, message=message))
