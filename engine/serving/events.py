"""What the front states about requests, and the one `Observer` that hears all events. Torch-free.

Every accepted request makes one `Arrived` and exactly one `Closed`; one that never was makes one `Rejected`.
All times are integer ns of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from inferdbg.engine.core.events import FinishReason, PromptScores, StepFailed, StepRecord
from inferdbg.engine.core.sampling_params import SamplingParams

__all__ = [
    "Arrived", "Boundaries", "BusyTimes", "ChoiceRecord", "Closed", "CoreStarted", "EndKind", "EngineLost", "Event",
    "Observer", "Rejected", "Stage", "TraceContext", "cached_prompt_tokens", "stages_of",
]  # fmt: skip


class EndKind(StrEnum):
    """How a request ended, as its client and the metrics see it."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """W3C trace context: `trace_id` is always set (drawn if none came in), `parent_span_id` only if one came in.

    `span_id` is the root span's, made early so that children and downstream can name it.
    """

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_span_id: str | None = None
    sampled: bool = True
    tracestate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request was accepted: its prompts are tokenized and its sequences are about to be enqueued."""

    request_id: str
    client_request_id: str | None
    replay_of: str | None
    time_ns: int  # first byte at the socket
    endpoint: str  # /v1/chat/completions, /v1/completions
    model: str
    prompts: tuple[tuple[int, ...], ...]  # token ids of each prompt
    sampling: SamplingParams  # seed resolved; a `ChoiceRecord` has the one of its own prompt
    stream: bool
    trace: TraceContext
    seq_ids: tuple[int, ...] = ()  # of its sequences, prompt by prompt and choice by choice: len(prompts) * n
    service_class: str | None = None
    tenant: str | None = None
    messages_json: str | None = None  # what the client sent; written only with --log-text
    prompt_text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A request that was never accepted, whoever's fault that was.

    `end` is rejected (malformed, too long, queue full, engine down), aborted (its client left before it was accepted)
    or failed (a fault of ours).
    """

    request_id: str
    client_request_id: str | None
    time_ns: int  # first byte at the socket
    closed_ns: int
    endpoint: str
    status: int  # HTTP status sent
    reason: str  # a short stable code: invalid_request, context_length, queue_full, unavailable, too_large, …
    message: str
    trace: TraceContext
    end: EndKind = EndKind.REJECTED
    boundaries: Boundaries | None = None  # as far as it came; None: its body was not read

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that were entered, from `time_ns` to `closed_ns`."""
        return stages_of(self.boundaries or Boundaries(received_ns=self.time_ns), self.closed_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Where the stages of a request, or of one choice, meet. None: not reached. Non-decreasing in this order."""

    received_ns: int  # first byte at the socket
    parsed_ns: int | None = None
    tokenized_ns: int | None = None
    admitted_ns: int | None = None  # first admission by the scheduler
    first_token_ns: int | None = None  # first token id at the front
    last_token_ns: int | None = None
    text_ready_ns: int | None = None
    sent_ns: int | None = None  # last byte handed to the transport


@dataclass(frozen=True, slots=True)
class Stage:
    """One named interval of a request's critical path."""

    name: str
    start_ns: int
    end_ns: int


STAGE_ENDS = (
    ("io.receive", "parsed_ns"),
    ("tokenize", "tokenized_ns"),
    ("schedule", "admitted_ns"),
    ("prefill", "first_token_ns"),
    ("decode", "last_token_ns"),
    ("detokenize", "text_ready_ns"),
    ("io.send", "sent_ns"),
)


def stages_of(boundaries: Boundaries, closed_ns: int) -> tuple[Stage, ...]:
    """The stages that were entered, gapless from `received_ns` to `closed_ns`: they add up to E2E exactly.

    The stage in which a request was cut short ends when the request was closed.
    """
    stages: list[Stage] = []
    start = boundaries.received_ns
    for name, attribute in STAGE_ENDS:
        end: int | None = getattr(boundaries, attribute)
        if end is None:
            break
        stages.append(Stage(name, start, max(start, end)))
        start = stages[-1].end_ns
    if len(stages) < len(STAGE_ENDS):
        stages.append(Stage(STAGE_ENDS[len(stages)][0], start, max(start, closed_ns)))
    elif closed_ns > start:
        stages[-1] = Stage(stages[-1].name, stages[-1].start_ns, closed_ns)
    return tuple(stages)


def cached_prompt_tokens(choices: Iterable[tuple[int, int | None]]) -> int:
    """Prompt tokens found in the prefix cache, of (choice_index, cached_tokens): each prompt counts once.

    The further choices of a prompt find what its first one has just computed: that is sharing, not a hit.
    """
    return sum(cached or 0 for choice_index, cached in choices if choice_index == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyTimes:
    """Work done for a request that overlaps its stages, in ns."""

    tokenize_wait_ns: int = 0  # waiting for a tokenizer thread
    tokenize_ns: int = 0  # in the tokenizer
    detokenize_ns: int = 0
    send_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRecord:
    """One choice of one prompt, as it ended: a row of the token log."""

    prompt_index: int
    choice_index: int
    seq_id: int
    seed: int  # what its noise was keyed by: the request's, or one derived for its prompt
    output_ids: tuple[int, ...]  # what was sampled, EOS and stop tokens included
    output_logprobs: tuple[float, ...]
    top_k: int
    top_ids: tuple[int, ...]  # (outputs * top_k)
    top_logprobs: tuple[float, ...]
    token_times_ns: tuple[int, ...]  # when each token id reached the front
    token_steps: tuple[int, ...]
    finish_reason: FinishReason | None  # None: cut short without one (aborted, failed)
    stop_matched: str | None  # the stop string, or the stop token id in decimal
    cached_tokens: int | None  # at first admission
    num_preemptions: int
    requeue_ns: int  # waiting again after preemptions
    boundaries: Boundaries
    output_text: str
    prompt_scores: PromptScores | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A request ended: exactly one per `Arrived`, built from the state that answered the client."""

    request_id: str
    end: EndKind
    closed_ns: int
    boundaries: Boundaries  # of the request: first admission, first token and last token over its choices
    first_text_ns: int | None
    first_byte_ns: int | None
    bytes_in: int
    bytes_out: int
    busy: BusyTimes
    choices: tuple[ChoiceRecord, ...]
    arrived: Arrived
    status: int  # HTTP status sent
    error: str | None = None
    error_type: str | None = None  # for error.type: a short stable code


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStarted:
    """A core is ready to take sequences. A restart makes a new incarnation."""

    incarnation: int
    time_ns: int
    pid: int
    info: dict[str, str | int | float | bool | None] = field(default_factory=dict)  # device, dtype, threads, pages…


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """The core died or hangs; every request in flight is about to be closed as failed."""

    incarnation: int
    time_ns: int
    reason: str
    request_ids: tuple[str, ...]


Event = Arrived | Rejected | Closed | CoreStarted | EngineLost | StepRecord | StepFailed
Observer = Callable[[Event], None]
"""Hears every event, on the front's event loop. Must not block and must not throw."""
