"""The state machine alone: whatever crosses, a request ends exactly once and its record does not depend on timing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferdbg.engine.core.events import FinishReason, StepFailed, StepRecord
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.serving.choice_state import ChoiceState
from inferdbg.engine.serving.detokenize import DetokenizerTraits
from inferdbg.engine.serving.dispatch import Dispatcher
from inferdbg.engine.serving.events import Arrived, Closed, EndKind, Rejected, TraceContext
from inferdbg.engine.serving.messages import Abort, Credit, Refused, Submit
from inferdbg.engine.serving.request_state import RequestHead, RequestState
from inferdbg.engine.serving.tokenize import Vocabulary

CREDIT = 8


class World:
    """A dispatcher with a clock that ticks, and no core behind it."""

    def __init__(self, tokenizer):
        self.now = 1000
        self.events = []
        self.sent = []
        self.dispatcher = Dispatcher(self.sent.append, CREDIT, self.tick)
        self.vocabulary = Vocabulary(tokenizer, DetokenizerTraits.of(tokenizer), None)
        self.num_steps = 0

    def tick(self):
        self.now += 1
        return self.now

    def request(self, *, n=1, stream=True, **sampling):
        head = RequestHead(
            request_id="r",
            received_ns=self.tick(),
            endpoint="/x",
            trace=TraceContext(trace_id="1" * 32, span_id="2" * 16),
        )
        request = RequestState(head, self.events.append)
        self.params = SamplingParams(**({"max_tokens": 100, "seed": 1, "n": n} | sampling))
        return request, stream

    def accept(self, request, stream):
        choices = [
            ChoiceState(
                prompt_index=0,
                choice_index=i,
                seq_id=self.dispatcher.new_seq_id(),
                sampling=self.params,
                detokenizer=self.vocabulary.detokenizer(skip_special_tokens=True),
                top_k=1,
            )
            for i in range(self.params.n)
        ]
        request.accept(
            model="m", prompts=[(50,)], sampling=self.params, stream=stream, messages_json=None, prompt_text=None,
            choices=choices,
        )  # fmt: skip
        self.dispatcher.submit(
            request, [SequenceRequest(seq_id=c.seq_id, prompt_ids=(50,), sampling=self.params) for c in choices]
        )

    def step(self, tokens=(), finished=(), admitted=(), preempted=(), resumed=()):
        """A step's record: tokens as (seq_id, token_id), finished as (seq_id, reason)."""
        self.num_steps += 1
        record = StepRecord(
            step=self.num_steps, start_ns=self.tick(), idle_ns=0, handoff_ns=0, schedule_ns=1, prepare_ns=0,
            execute_ns=0, sample_ns=0, publish_ns=0,
            chunk_seq_ids=tuple(s for s, _ in tokens), chunk_starts=tuple(0 for _ in tokens),
            chunk_lens=tuple(1 for _ in tokens), chunk_is_prefill=tuple(False for _ in tokens),
            sampled_seq_ids=tuple(s for s, _ in tokens), sampled_ids=tuple(t for _, t in tokens),
            sampled_logprobs=tuple(-1.0 for _ in tokens), sampled_top_k=1,
            sampled_top_ids=tuple(t for _, t in tokens), sampled_top_logprobs=tuple(-1.0 for _ in tokens),
            prompt_scores=(), admitted_seq_ids=(*admitted, *resumed),
            admitted_cached=tuple(0 for _ in (*admitted, *resumed)),
            admitted_is_resume=(*(False for _ in admitted), *(True for _ in resumed)),
            preempted_seq_ids=tuple(preempted), preempted_lost=tuple(1 for _ in preempted),
            finished_seq_ids=tuple(s for s, _ in finished), finished_reasons=tuple(r for _, r in finished),
            num_running=1, waiting_reasons=(), waiting_requests=(), waiting_tokens=(), oldest_waiting_ns=None,
            token_budget=1, pages_free=1, pages_used=0, pages_cached=0, prefix_queried_tokens=0, prefix_hit_tokens=0,
            evicted_pages=0, graph_bucket=None,
        )  # fmt: skip
        self.dispatcher.on_step(record)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def aborted(self):
        return [seq_id for message in self.sent if isinstance(message, Abort) for seq_id in message.seq_ids]


@pytest.fixture
def world(tokenizer):
    return World(tokenizer)


def ids_of(tokenizer, text):
    return tokenizer.encode(text).ids


def test_late_tokens_after_a_stop_string_are_not_recorded(world, tokenizer):
    request, stream = world.request(stop=("brown",))
    world.accept(request, stream)
    for token_id in ids_of(tokenizer, "the quick brown fox jumps"):
        world.step([(0, token_id)])
    world.step(finished=[(0, FinishReason.ABORT)])  # the core's answer to the abort that the stop caused
    request.close(EndKind.FINISHED, status=200, now_ns=world.tick())
    choice = world.of(Closed)[0].choices[0]
    assert choice.output_text == "the quick "
    assert list(choice.output_ids) == ids_of(tokenizer, "the quick brown")
    assert choice.finish_reason is FinishReason.STOP
    assert world.aborted() == [0]


def test_a_finish_that_crosses_an_abort_changes_nothing(world, tokenizer):
    request, stream = world.request()
    world.accept(request, stream)
    world.step([(0, 60)], admitted=[0])
    world.dispatcher.abort(request)
    request.close(EndKind.ABORTED, status=499, now_ns=world.tick())
    world.step([(0, 61)], finished=[(0, FinishReason.LENGTH)])
    world.dispatcher.lose_core("died")
    assert not request.close(EndKind.FINISHED, status=200, now_ns=world.tick())
    (closed,) = world.of(Closed)
    assert closed.end is EndKind.ABORTED
    assert closed.choices[0].output_ids == (60,)
    assert closed.choices[0].finish_reason is None


def test_one_failing_choice_fails_the_request_and_aborts_the_others(world):
    request, stream = world.request(n=3)
    world.accept(request, stream)
    world.dispatcher.on_failed(StepFailed(step=1, time_ns=1, stage="execute", error="E", seq_ids=(1,)))
    assert request.failure.status == 500
    assert sorted(world.aborted()) == [0, 1, 2]
    assert world.dispatcher.num_live == 0


def test_a_sequence_the_core_refuses_rejects_its_request(world):
    request, stream = world.request(n=2)
    world.accept(request, stream)
    world.dispatcher.on_refused(Refused(0, "too long for the pages"))
    assert (request.failure.end, request.failure.status) == (EndKind.REJECTED, 400)
    assert world.aborted() == [1]


def test_a_rejected_request_cannot_be_closed_and_the_other_way_round(world):
    request, stream = world.request()
    assert request.reject(status=400, reason="r", message="m", now_ns=1)
    assert not request.reject(status=400, reason="r", message="m", now_ns=1)
    assert not request.close(EndKind.FAILED, status=500, now_ns=1)
    other, stream = world.request()
    world.accept(other, stream)
    assert not other.reject(status=400, reason="r", message="m", now_ns=1)
    assert other.close(EndKind.FAILED, status=500, now_ns=world.tick())
    assert (len(world.of(Rejected)), len(world.of(Arrived)), len(world.of(Closed))) == (1, 1, 1)


def test_credit_is_granted_in_lots_as_a_streaming_client_takes_tokens(world):
    request, stream = world.request()
    world.accept(request, stream)
    for i in range(CREDIT):
        assert world.dispatcher.has_runnable
        world.step([(0, 60 + i)])
    assert not world.dispatcher.has_runnable  # paused: the core owes nothing
    assert not [m for m in world.sent if isinstance(m, Credit)]
    choice = request.choices[0]
    for taken in (1, 2, 3):
        choice.num_taken = taken
        world.dispatcher.grant(choice)
    assert [m for m in world.sent if isinstance(m, Credit)] == [Credit(0, 2)]
    assert choice.credit_left == 2
    assert world.dispatcher.has_runnable


def test_tokens_without_text_do_not_use_up_the_credit(world, tokenizer):
    request, stream = world.request()
    world.accept(request, stream)
    half = tokenizer.encode("é").ids[:1]  # never becomes a character
    for _ in range(5 * CREDIT):
        world.step([(0, half[0])])
        assert request.take_deltas(with_tokens=False) == []
        world.dispatcher.grant(request.choices[0])
        assert world.dispatcher.has_runnable


def test_a_request_that_is_not_streamed_is_never_paused(world):
    request, _ = world.request(stream=False)
    world.accept(request, False)
    for i in range(50):
        world.step([(0, 60 + i)])
        assert world.dispatcher.has_runnable
    assert sum(m.tokens for m in world.sent if isinstance(m, Credit)) == 50


def test_waiting_after_preemptions_is_summed_and_the_first_admission_kept(world):
    request, stream = world.request()
    world.accept(request, stream)
    world.step([(0, 60)], admitted=[0])
    first = request.choices[0].admitted_ns
    for _ in range(2):
        world.step(preempted=[0])
        begun = world.now
        world.step()
        world.step([(0, 61)], resumed=[0])
        assert world.now > begun
    choice = request.choices[0]
    assert choice.num_preemptions == 2
    assert choice.admitted_ns == first
    assert choice.requeue_ns > 0
    assert choice.cached_tokens == 0


EVENTS = st.lists(
    st.sampled_from(
        ["token", "stop", "length", "abort", "lose", "fail", "refuse", "disconnect", "close", "reject", "take"]
    ),
    max_size=25,
)


@given(events=EVENTS, n=st.integers(1, 3), accepted=st.booleans())
@settings(max_examples=300, deadline=None)
def test_whatever_crosses_a_request_ends_at_most_once_and_consistently(tokenizer, events, n, accepted):
    world = World(tokenizer)
    request, stream = world.request(n=n, stop=("fox",))
    if accepted:
        world.accept(request, stream)
    ids = ids_of(tokenizer, "the quick brown fox")
    sent_text = [""] * n
    for i, event in enumerate(events):
        seq_id = i % n
        match event:
            case "token":
                world.step([(seq_id, ids[i % len(ids)])])
            case "stop" | "length":
                world.step([(seq_id, ids[0])], finished=[(seq_id, FinishReason(event))])
            case "abort":
                world.dispatcher.abort(request)
            case "lose":
                world.dispatcher.lose_core("gone")
            case "fail":
                world.dispatcher.on_failed(StepFailed(step=1, time_ns=1, stage="s", error="e", seq_ids=(seq_id,)))
            case "refuse":
                world.dispatcher.on_refused(Refused(seq_id, "no"))
            case "disconnect":
                request.disconnect()
            case "close":
                request.close(EndKind.FINISHED, status=200, now_ns=world.tick())
            case "reject":
                request.reject(status=400, reason="r", message="m", now_ns=world.tick())
            case "take":
                for delta in request.take_deltas(with_tokens=True):
                    sent_text[delta.choice.choice_index] += delta.text
    world.dispatcher.abort(request)
    request.reject(status=500, reason="r", message="m", now_ns=world.tick())
    request.close(EndKind.FAILED, status=500, now_ns=world.tick())
    assert len(world.of(Rejected)) + len(world.of(Closed)) == 1
    assert len(world.of(Arrived)) == len(world.of(Closed)) == int(accepted)
    assert world.dispatcher.num_live == 0
    assert sum(isinstance(m, Submit) for m in world.sent) == int(accepted)
    for closed in world.of(Closed):
        for choice, sent in zip(closed.choices, sent_text, strict=True):
            assert "fox" not in choice.output_text
            assert choice.output_text.startswith(sent)
            columns = (choice.output_logprobs, choice.token_times_ns, choice.token_steps, choice.top_ids)
            assert {len(column) for column in columns} == {len(choice.output_ids)}
            assert list(choice.token_times_ns) == sorted(choice.token_times_ns)
            times = [
                getattr(choice.boundaries, name)
                for name in ("received_ns", "first_token_ns", "last_token_ns", "text_ready_ns")
            ]
            known = [time for time in times if time is not None]
            assert known == sorted(known)
