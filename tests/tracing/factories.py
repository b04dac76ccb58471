"""Synthetic events: a scripted engine that emits what a real front and core would, without either."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from inferdbg.engine.core.events import FinishReason, PromptScores, StepRecord, WaitReason
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.serving.events import (
    Arrived,
    Boundaries,
    BusyTimes,
    ChoiceRecord,
    Closed,
    CoreStarted,
    EndKind,
    Event,
    Rejected,
    TraceContext,
)

MS = 1_000_000
START_NS = 5_000_000_000_000


def trace_context(name: str, **changes: Any) -> TraceContext:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return replace(TraceContext(trace_id=digest[:32], span_id=digest[32:48]), **changes)


def arrived(name: str = "req-1", **changes: Any) -> Arrived:
    prompts = changes.get("prompts", ((10, 11, 12, 13),))
    sampling = changes.get("sampling", SamplingParams(max_tokens=64, temperature=0.0, seed=7))
    base = Arrived(
        request_id=name,
        client_request_id=None,
        replay_of=None,
        time_ns=START_NS,
        endpoint="/v1/chat/completions",
        model="tiny",
        prompts=prompts,
        sampling=sampling,
        stream=True,
        trace=trace_context(name),
        seq_ids=tuple(range(len(prompts) * sampling.n)),
    )
    return replace(base, **changes)


def boundaries(received_ns: int = START_NS, **changes: Any) -> Boundaries:
    """1 ms in io.receive, 2 tokenize, 3 schedule, 10 prefill, 40 decode, 1 detokenize, 2 io.send."""
    offsets = {
        "parsed_ns": 1,
        "tokenized_ns": 3,
        "admitted_ns": 6,
        "first_token_ns": 16,
        "last_token_ns": 56,
        "text_ready_ns": 57,
        "sent_ns": 59,
    }
    known: dict[str, int | None] = {name: received_ns + ms * MS for name, ms in offsets.items()}
    return Boundaries(received_ns=received_ns, **(known | changes))


def choice(output_ids: tuple[int, ...] = (20, 21, 22), **changes: Any) -> ChoiceRecord:
    number = len(output_ids)
    bounds = changes.get("boundaries", boundaries())
    first = bounds.first_token_ns or bounds.received_ns
    gap = ((bounds.last_token_ns or first) - first) // max(1, number - 1)
    base = ChoiceRecord(
        prompt_index=0,
        choice_index=0,
        seq_id=0,
        seed=7,
        output_ids=output_ids,
        output_logprobs=tuple(-0.25 * (i + 1) for i in range(number)),
        top_k=2,
        top_ids=tuple(i for token in output_ids for i in (token, token + 1)),
        top_logprobs=tuple(x for i in range(number) for x in (-0.25 * (i + 1), -3.0)),
        token_times_ns=tuple(first + i * gap for i in range(number)),
        token_steps=tuple(range(1, number + 1)),
        finish_reason=FinishReason.STOP,
        stop_matched=None,
        cached_tokens=2,
        num_preemptions=0,
        requeue_ns=0,
        boundaries=bounds,
        output_text="a text",
    )
    return replace(base, **changes)


def closed(arrival: Arrived | None = None, **changes: Any) -> Closed:
    arrival = arrival or arrived()
    bounds = changes.pop("boundaries", None) or boundaries(arrival.time_ns)
    choices = changes.pop("choices", None)
    if choices is None:
        choices = (choice(boundaries=bounds, seq_id=arrival.seq_ids[0] if arrival.seq_ids else 0),)
    base = Closed(
        request_id=arrival.request_id,
        end=EndKind.FINISHED,
        closed_ns=bounds.sent_ns or bounds.received_ns + 60 * MS,
        boundaries=bounds,
        first_text_ns=bounds.first_token_ns,
        first_byte_ns=bounds.first_token_ns,
        bytes_in=100,
        bytes_out=200,
        busy=BusyTimes(tokenize_wait_ns=1 * MS, tokenize_ns=1 * MS, detokenize_ns=3 * MS, send_ns=4 * MS),
        choices=choices,
        arrived=arrival,
        status=200,
    )
    return replace(base, **changes)


def rejected(name: str = "req-bad", **changes: Any) -> Rejected:
    base = Rejected(
        request_id=name,
        client_request_id=None,
        time_ns=START_NS,
        closed_ns=START_NS + 2 * MS,
        endpoint="/v1/completions",
        status=429,
        reason="queue_full",
        message="1024 requests are waiting",
        trace=trace_context(name),
    )
    return replace(base, **changes)


def core_started(incarnation: int = 1, **changes: Any) -> CoreStarted:
    base = CoreStarted(incarnation=incarnation, time_ns=START_NS, pid=4242, info={"device": "cpu", "dtype": "float32"})
    return replace(base, **changes)


def step(number: int = 1, seqs: tuple[int, ...] = (0,), *, prefill: int = 0, **changes: Any) -> StepRecord:
    """A decode step of the sequences; with `prefill`, the last one computes so many prompt tokens instead.

    The first step admits its sequences.
    """
    admitted = seqs if number == 1 else ()
    is_prefill = tuple(bool(prefill) and i == len(seqs) - 1 for i in range(len(seqs)))
    base = StepRecord(
        step=number,
        start_ns=START_NS + number * 20 * MS,
        idle_ns=1 * MS,
        handoff_ns=0,
        schedule_ns=1 * MS,
        prepare_ns=1 * MS,
        execute_ns=12 * MS,
        sample_ns=2 * MS,
        publish_ns=1 * MS,
        chunk_seq_ids=seqs,
        chunk_starts=tuple(4 + number for _ in seqs),
        chunk_lens=tuple(prefill if flag else 1 for flag in is_prefill),
        chunk_is_prefill=is_prefill,
        sampled_seq_ids=seqs,
        sampled_ids=tuple(100 * seq + number for seq in seqs),
        sampled_logprobs=tuple(-0.5 for _ in seqs),
        sampled_top_k=2,
        sampled_top_ids=tuple(x for seq in seqs for x in (100 * seq + number, 9)),
        sampled_top_logprobs=tuple(x for _ in seqs for x in (-0.5, -2.0)),
        prompt_scores=(),
        admitted_seq_ids=admitted,
        admitted_cached=(0,) * len(admitted),
        admitted_is_resume=(False,) * len(admitted),
        preempted_seq_ids=(),
        preempted_lost=(),
        finished_seq_ids=(),
        finished_reasons=(),
        num_running=len(seqs),
        waiting_reasons=(WaitReason.SLOTS,),
        waiting_requests=(3,),
        waiting_tokens=(300,),
        oldest_waiting_ns=START_NS,
        token_budget=512,
        pages_free=90,
        pages_used=8,
        pages_cached=2,
        prefix_queried_tokens=0,
        prefix_hit_tokens=0,
        evicted_pages=0,
        graph_bucket=None,
    )
    return replace(base, **changes)


def scores(seq_id: int = 0, number: int = 3, k: int = 2) -> PromptScores:
    return PromptScores(
        seq_id=seq_id,
        logprobs=tuple(-1.0 - i for i in range(number)),
        k=k,
        top_ids=tuple(range(number * k)),
        top_logprobs=tuple(-1.0 for _ in range(number * k)),
    )


@dataclass
class Script:
    """A little load: `num_requests` requests of `num_tokens` output tokens each, all decoded in company."""

    num_requests: int = 4
    num_tokens: int = 5
    events: list[Event] = field(default_factory=list)

    def run(self) -> list[Event]:
        self.events = [core_started()]
        arrivals = [
            arrived(
                f"req-{i:04d}",
                time_ns=START_NS + i * MS,
                prompts=(tuple(range(i, i + 6)),),
                seq_ids=(i,),
                client_request_id=f"client-{i}",
            )
            for i in range(self.num_requests)
        ]
        self.events += arrivals
        seqs = tuple(range(self.num_requests))
        self.events.append(
            step(
                1,
                seqs,
                prefill=6,
                admitted_seq_ids=seqs,
                admitted_cached=(2,) * len(seqs),
                admitted_is_resume=(False,) * len(seqs),
                prefix_queried_tokens=6 * len(seqs),
                prefix_hit_tokens=2 * len(seqs),
            )
        )
        self.events += [step(n, seqs) for n in range(2, self.num_tokens + 1)]
        for i, arrival in enumerate(arrivals):
            outputs = tuple(100 * i + n for n in range(1, self.num_tokens + 1))
            one = choice(outputs, seq_id=i, boundaries=boundaries(arrival.time_ns))
            self.events.append(closed(arrival, choices=(one,)))
        return self.events
