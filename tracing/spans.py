"""Builds the span tree of a request when it has ended, with its real times; and spans of steps, while a window is open.

Names and attributes are those of `catalog`. Spans are made as `ReadableSpan`s outright, not through a tracer: their ids
were given out when the request arrived, their times lie in the past, and nothing may happen when they "start".
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from inferdbg.engine.core.events import StepRecord
from inferdbg.engine.serving.events import (
    Closed,
    EndKind,
    Rejected,
    Stage,
    TraceContext,
    cached_prompt_tokens,
    stages_of,
)
from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.flights import Flight, NoteKind
from inferdbg.tracing.step_kind import step_kind, step_tokens

__all__ = ["ServerAddress", "SpanBuilder", "make_resource", "make_scope"]

_NOTE_EVENTS = {
    NoteKind.CACHE_HIT: ("inferdbg.prefix_cache.hit", "inferdbg.cached_tokens"),
    NoteKind.PREEMPTED: ("inferdbg.preempted", "inferdbg.lost_tokens"),
    NoteKind.RESUMED: ("inferdbg.resumed", "inferdbg.cached_tokens"),
}
_OPERATIONS = {"/v1/chat/completions": "chat"}  # every other endpoint of ours completes text
_PROVIDER = "inferdbg"
_EXECUTE = ("prefill", "decode")
_STEP_STAGES = ("schedule", "prepare", "execute", "sample", "publish")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where the server listens."""

    host: str
    port: int


def make_resource(version: str, replica: str, run: str | None) -> Resource:
    """What every span is about. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are obeyed."""
    attributes = {"service.version": version, "service.instance.id": replica}
    if run is not None:
        attributes["inferdbg.run"] = _clean(run)
    resource = Resource.create(attributes)
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "inferdbg"}))
    return resource


def make_scope(version: str) -> InstrumentationScope:
    """Who made the spans."""
    return InstrumentationScope("inferdbg", version)


class SpanBuilder:
    """Events to spans. Pure but for the span ids it draws."""

    def __init__(
        self,
        clock: ClockPair,
        resource: Resource,
        scope: InstrumentationScope,
        replica: str,
        address: ServerAddress | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._clock = clock
        self._resource = resource
        self._scope = scope
        self._replica = replica
        self._address = address
        self._rng = rng or random.SystemRandom()

    def request(self, event: Closed, flight: Flight) -> list[ReadableSpan]:
        """The tree of one request, root first."""
        stages = stages_of(event.boundaries, event.closed_ns)
        model = _clean(event.arrived.model)
        operation = _operation(event.arrived.endpoint)
        root = self._root(
            event.arrived.trace, f"{operation} {model}", stages, self._request_attributes(event, operation, model),
            _status(event.end),
        )  # fmt: skip
        assert root.context is not None
        return [root, *self._stage_spans(event, flight, stages, root.context)]

    def rejected(self, event: Rejected) -> list[ReadableSpan]:
        """The root of a request that was never accepted, and the stages it came through."""
        operation = _operation(event.endpoint)
        stages = event.stages
        attributes = self._common(event.request_id, event.client_request_id, operation, event.endpoint)
        attributes |= {
            "inferdbg.end": event.end.value,
            "error.type": _clean(event.reason),
            "http.response.status_code": event.status,
        }
        root = self._root(event.trace, operation, stages, attributes, _status(event.end))
        assert root.context is not None
        return [root, *(self._child(stage.name, root.context, stage.start_ns, stage.end_ns) for stage in stages)]

    def step(self, record: StepRecord, flights: Sequence[Flight]) -> list[ReadableSpan]:
        """A trace of its own: the step and its stages, linked to the requests it computed for."""
        context = SpanContext(self._rng.getrandbits(128) or 1, self._span_id(), False, TraceFlags(1))
        links = [Link(_context(flight.arrived.trace)) for flight in flights]
        prefill, decode = step_tokens(record)
        attributes: dict[str, Any] = {
            "inferdbg.replica": self._replica,
            "inferdbg.step": record.step,
            "inferdbg.step.kind": step_kind(record),
            "inferdbg.step.num_sequences": len(record.chunk_seq_ids),
            "inferdbg.step.prefill_tokens": prefill,
            "inferdbg.step.decode_tokens": decode,
            "inferdbg.step.idle_seconds": record.idle_ns / 1e9,
            "inferdbg.step.pages_free": record.pages_free,
            "inferdbg.step.num_waiting": sum(record.waiting_requests),
        }
        if record.graph_bucket is not None:
            attributes["inferdbg.step.graph_bucket"] = record.graph_bucket
        spans = [self._span("step", context, None, record.start_ns, record.end_ns, attributes, links=links)]
        at = record.start_ns
        for stage in _STEP_STAGES:
            end = at + int(getattr(record, f"{stage}_ns"))
            spans.append(self._child(f"step.{stage}", context, at, end))
            at = end
        return spans

    def _request_attributes(self, event: Closed, operation: str, model: str) -> dict[str, Any]:
        arrived, sampling = event.arrived, event.arrived.sampling
        attributes = self._common(arrived.request_id, arrived.client_request_id, operation, arrived.endpoint)
        attributes |= {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.stream": arrived.stream,
            "gen_ai.request.max_tokens": min(sampling.max_tokens, 2**63 - 1),
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_p": float(sampling.top_p),
            "gen_ai.usage.input_tokens": sum(len(prompt) for prompt in arrived.prompts),
            "gen_ai.usage.output_tokens": sum(len(choice.output_ids) for choice in event.choices),
            "gen_ai.usage.cache_read.input_tokens": cached_prompt_tokens(
                (c.choice_index, c.cached_tokens) for c in event.choices
            ),
            "http.response.status_code": event.status,
            "inferdbg.end": event.end.value,
            "inferdbg.num_preemptions": sum(c.num_preemptions for c in event.choices),
            "inferdbg.requeue_seconds": max((c.requeue_ns for c in event.choices), default=0) / 1e9,
            "inferdbg.bytes_in": event.bytes_in,
            "inferdbg.bytes_out": event.bytes_out,
        }
        received = event.boundaries.received_ns
        reasons = tuple(c.finish_reason.value for c in event.choices if c.finish_reason is not None)
        optional: dict[str, Any] = {
            "gen_ai.response.finish_reasons": reasons or None,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": sampling.n if sampling.n != 1 else None,
            "gen_ai.request.top_k": min(sampling.top_k, 2**63 - 1) if sampling.top_k > 0 else None,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
            "gen_ai.response.time_to_first_chunk": (
                _seconds(received, event.first_byte_ns) if arrived.stream else None
            ),
            "inferdbg.ttft_seconds": _seconds(received, event.boundaries.first_token_ns),
            "inferdbg.replay_of": arrived.replay_of,
            "inferdbg.service_class": arrived.service_class,
            "error.type": None if event.end is EndKind.FINISHED else event.error_type or event.end.value,
        }
        return attributes | {
            key: _clean(value) if isinstance(value, str) else value
            for key, value in optional.items()
            if value is not None
        }

    def _common(self, request_id: str, client_id: str | None, operation: str, endpoint: str) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.output.type": "text",
            "gen_ai.response.id": _clean(request_id),
            "url.path": _clean(endpoint),
            "inferdbg.request_id": _clean(request_id),
            "inferdbg.replica": self._replica,
        }
        if client_id is not None:
            attributes["inferdbg.client_request_id"] = _clean(client_id)
        if self._address is not None:
            attributes |= {"server.address": self._address.host, "server.port": self._address.port}
        return attributes

    def _stage_spans(
        self, event: Closed, flight: Flight, stages: Sequence[Stage], root: SpanContext
    ) -> list[ReadableSpan]:
        busy = event.busy
        attributes: Mapping[str, dict[str, Any]] = {
            "tokenize": {
                "inferdbg.wait_seconds": busy.tokenize_wait_ns / 1e9,
                "inferdbg.busy_seconds": busy.tokenize_ns / 1e9,
            },
            "detokenize": {"inferdbg.busy_seconds": busy.detokenize_ns / 1e9},
            "io.send": {"inferdbg.busy_seconds": busy.send_ns / 1e9},
        }
        spans: list[ReadableSpan] = []
        execute: SpanContext | None = None
        executed = [stage for stage in stages if stage.name in _EXECUTE]
        for stage in stages:
            if stage.name in _EXECUTE and execute is None:
                span = self._child(
                    "execute", root, executed[0].start_ns, executed[-1].end_ns, events=self._notes(event, flight)
                )
                execute = span.context
                spans.append(span)
            parent = execute if stage.name in _EXECUTE and execute is not None else root
            spans.append(self._child(stage.name, parent, stage.start_ns, stage.end_ns, attributes.get(stage.name)))
        return spans

    def _notes(self, event: Closed, flight: Flight) -> list[SpanEvent]:
        places = {choice.seq_id: choice for choice in event.choices}
        events = []
        for note in flight.notes:
            name, counted = _NOTE_EVENTS[note.kind]
            attributes: dict[str, Any] = {"inferdbg.step": note.step, counted: note.tokens}
            if (choice := places.get(note.seq_id)) is not None:
                attributes["inferdbg.prompt_index"] = choice.prompt_index
                attributes["inferdbg.choice_index"] = choice.choice_index
            events.append(SpanEvent(name, attributes, timestamp=self._clock.wall(note.time_ns)))
        return events

    def _root(
        self,
        trace: TraceContext,
        name: str,
        stages: Sequence[Stage],
        attributes: Mapping[str, Any],
        status: Status,
    ) -> ReadableSpan:
        context = _context(trace)
        parent = None
        if trace.parent_span_id is not None:
            flags = TraceFlags(1 if trace.sampled else 0)
            parent = SpanContext(context.trace_id, int(trace.parent_span_id, 16), True, flags, context.trace_state)
        return self._span(
            name, context, parent, stages[0].start_ns, stages[-1].end_ns, attributes,
            kind=SpanKind.SERVER, status=status,
        )  # fmt: skip

    def _child(
        self,
        name: str,
        parent: SpanContext,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Any] | None = None,
        events: Sequence[SpanEvent] = (),
    ) -> ReadableSpan:
        context = SpanContext(parent.trace_id, self._span_id(), False, parent.trace_flags, parent.trace_state)
        return self._span(name, context, parent, start_ns, end_ns, attributes, events=events)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Any] | None,
        **rest: Any,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            instrumentation_scope=self._scope,
            attributes=dict(attributes or {}),
            start_time=self._clock.wall(start_ns),
            end_time=self._clock.wall(end_ns),
            **rest,
        )

    def _span_id(self) -> int:
        return self._rng.getrandbits(64) or 1  # zero is no valid id


def _context(trace: TraceContext) -> SpanContext:
    state = TraceState.from_header([trace.tracestate]) if trace.tracestate else None
    return SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), False, TraceFlags(1), state)


def _operation(endpoint: str) -> str:
    return _OPERATIONS.get(endpoint, "text_completion")


def _status(end: EndKind) -> Status:
    return Status(StatusCode.OK if end is EndKind.FINISHED else StatusCode.ERROR)


def _seconds(start_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else max(0, end_ns - start_ns) / 1e9


def _clean(text: str) -> str:
    """UTF-8 at any rate: a client's JSON may hold lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()
