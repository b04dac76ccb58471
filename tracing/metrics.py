"""Prometheus metrics of one replica, from events. Names, helps and buckets are those of `catalog`.

Knows no HTTP: `response` gives bytes and a content type. Histograms and counters move when an event is handled;
gauges are computed at the scrape from the last step and from what is in flight, so none outlives its cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from inferdbg.engine.core.events import FinishReason, StepFailed, StepRecord
from inferdbg.engine.serving.events import (
    STAGE_ENDS,
    Arrived,
    ChoiceRecord,
    Closed,
    CoreStarted,
    EndKind,
    EngineLost,
    Event,
    Rejected,
    stages_of,
)  # fmt: skip
from inferdbg.tracing.batch_histogram import BatchHistogram
from inferdbg.tracing.bus import Gap
from inferdbg.tracing.catalog import MetricKind, buckets_with_slo, metric
from inferdbg.tracing.metrics_scrape import ScrapeCollector, ScrapeState
from inferdbg.tracing.step_kind import STEP_KINDS, step_kind, step_tokens
from inferdbg.tracing.waiting import WaitingLine

__all__ = ["Metrics"]

_STEP_STAGES = ("schedule", "prepare", "execute", "sample", "publish", "idle")
_BUSY = ("tokenize_wait", "tokenize", "detokenize", "send")
_REASONS = ("invalid_request", "context_length", "queue_full", "unavailable", "too_large")
_MAX_REASONS = 32  # label values are bounded; beyond: "other"


class _Family:
    """A metric with its replica label bound, and its children bound as they are first used."""

    def __init__(self, name: str, registry: CollectorRegistry, replica: tuple[str, str], slo: float | None) -> None:
        spec = metric(name)
        labels = (replica[0], *spec.labels)
        match spec.kind:
            case MetricKind.COUNTER:
                self._metric: Any = Counter(spec.name, spec.help, labels, registry=registry)
            case MetricKind.GAUGE:
                self._metric = Gauge(spec.name, spec.help, labels, registry=registry)
            case MetricKind.HISTOGRAM:
                edges = buckets_with_slo(spec, slo)
                self._metric = Histogram(spec.name, spec.help, labels, buckets=edges, registry=registry)
        self._replica = replica[1]
        self._children: dict[tuple[str, ...], Any] = {}

    def __call__(self, *labels: str) -> Any:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._metric.labels(self._replica, *labels)
        return child


class Metrics:
    """A `bus.Handler`; everything but `response` runs on the recording thread.

    Args:
        replica: value of the replica label; `replica_label` its name.
        slo_ttft_seconds: becomes an edge of the TTFT histogram and a gauge.
        dropped: lost telemetry by signal; cpu_seconds: instrumentation by thread; loop_lag: of the front, in seconds.
    """

    def __init__(
        self,
        *,
        replica: str,
        model: str,
        version: str,
        dropped: Callable[[], Mapping[str, int]],
        cpu_seconds: Callable[[], Mapping[str, float]],
        loop_lag: Callable[[], float] | None = None,
        replica_label: str = "replica",
        slo_ttft_seconds: float | None = None,
        num_slots: int | None = None,
        wall_ns: Callable[[int], int] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._waiting = WaitingLine()
        self._state = ScrapeState(num_slots=num_slots, slo_ttft_seconds=slo_ttft_seconds, waiting=self._waiting)
        self._in_flight: set[str] = set()
        self._reasons = set(_REASONS)
        label = (replica_label, replica)

        def family(name: str, slo: float | None = None) -> _Family:
            return _Family(f"inferdbg_{name}", self.registry, label, slo)

        self._ttft = family("time_to_first_token_seconds", slo_ttft_seconds)()
        itl = metric("inferdbg_inter_token_latency_seconds")
        self._itl = BatchHistogram(itl.name, itl.help, label, itl.buckets, self.registry)
        self._tpot = family("time_per_output_token_seconds")()
        self._e2e = family("request_duration_seconds")
        self._queue = family("queue_time_seconds")()
        self._stages = family("request_stage_seconds_total")
        self._busy = family("request_busy_seconds_total")
        self._prompt_tokens = family("request_prompt_tokens")()
        self._output_tokens = family("request_output_tokens")()
        self._arrived = family("requests_arrived_total")()
        self._closed = family("requests_closed_total")
        self._rejected = family("requests_rejected_total")
        self._choices = family("choices_finished_total")
        self._tokens_arrived = family("tokens_arrived_total")()
        self._tokens_processed = family("tokens_processed_total")
        self._tokens_sampled = family("tokens_sampled_total")()
        self._steps = family("steps_total")
        self._steps_failed = family("steps_failed_total")
        self._step_seconds = family("step_seconds")
        self._step_tokens = family("step_tokens")
        self._step_stages = family("step_stage_seconds_total")
        self._phase_busy = family("phase_busy_seconds_total")
        self._evicted = family("pages_evicted_total")()
        self._queried = family("prefix_cache_queried_tokens_total")()
        self._hits = family("prefix_cache_hit_tokens_total")()
        self._preemptions = family("preemptions_total")()
        self._lost_tokens = family("preemption_lost_tokens_total")()
        self._engine_lost = family("engine_lost_total")()
        family("build_info")(version, model).set(1)
        self._start_at_zero()
        self.registry.register(
            ScrapeCollector(
                self._state, replica=label, dropped=dropped, cpu_seconds=cpu_seconds, loop_lag=loop_lag,
                wall_ns=wall_ns or (lambda time_ns: time.time_ns() - (clock() - time_ns)), clock=clock,
            )
        )  # fmt: skip

    def response(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition in the format that the Accept header asks for (OpenMetrics with exemplars, or text)."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self.registry), content_type

    def __call__(self, event: Event | Gap) -> None:
        match event:
            case StepRecord():
                self._step(event)
            case Arrived():
                self._arrive(event)
            case Closed():
                self._close(event)
            case Rejected():
                self._closed(event.end.value).inc()
                if event.end is EndKind.REJECTED:
                    self._rejected(self._reason(event.reason)).inc()
            case StepFailed():
                self._steps_failed(event.stage).inc()
            case CoreStarted():
                self._state.incarnation = event.incarnation
                self._lose_step()
            case EngineLost():
                self._engine_lost.inc()
                self._lose_step()
            case Gap():
                pass  # counted by the bus

    def _start_at_zero(self) -> None:
        """A series that appears only with its first event hides that event from `rate`."""
        for end in EndKind:
            self._closed(end.value)
            self._e2e(end.value)
        for stage, _ in STAGE_ENDS:
            self._stages(stage)
        for phase in ("prefill", "decode"):
            self._tokens_processed(phase)
            self._phase_busy(phase)
        for kind in STEP_KINDS:
            self._steps(kind)
        for stage in _STEP_STAGES:
            self._step_stages(stage)
        for reason in (*FinishReason, "none"):
            self._choices(str(reason))
        for reason in _REASONS:
            self._rejected(reason)
        for work in _BUSY:
            self._busy(work)

    def _arrive(self, event: Arrived) -> None:
        self._arrived.inc()
        num_tokens = sum(len(prompt) for prompt in event.prompts)
        self._tokens_arrived.inc(num_tokens)
        self._prompt_tokens.observe(num_tokens)
        self._waiting.arrive(event)
        self._in_flight.add(event.request_id)
        self._state.num_in_flight = len(self._in_flight)

    def _close(self, event: Closed) -> None:
        self._waiting.leave(event.arrived.seq_ids)
        self._in_flight.discard(event.request_id)
        self._state.num_in_flight = len(self._in_flight)
        exemplar = {"trace_id": event.arrived.trace.trace_id}
        end, boundaries = event.end.value, event.boundaries
        self._closed(end).inc()
        if event.end is EndKind.REJECTED:
            self._rejected(self._reason(event.error_type or "other")).inc()
        stages = stages_of(boundaries, event.closed_ns)
        for stage in stages:
            self._stages(stage.name).inc((stage.end_ns - stage.start_ns) / 1e9)
        self._e2e(end).observe((stages[-1].end_ns - stages[0].start_ns) / 1e9, exemplar)
        for work in _BUSY:
            self._busy(work).inc(getattr(event.busy, f"{work}_ns") / 1e9)
        if boundaries.admitted_ns is not None and boundaries.tokenized_ns is not None:
            self._queue.observe(max(0, boundaries.admitted_ns - boundaries.tokenized_ns) / 1e9, exemplar)
        if boundaries.first_token_ns is not None:
            self._ttft.observe(max(0, boundaries.first_token_ns - boundaries.received_ns) / 1e9, exemplar)
        self._output_tokens.observe(sum(len(choice.output_ids) for choice in event.choices))
        for choice in event.choices:
            self._choice(choice, exemplar)

    def _choice(self, choice: ChoiceRecord, exemplar: dict[str, str]) -> None:
        self._choices("none" if choice.finish_reason is None else choice.finish_reason.value).inc()
        times = choice.token_times_ns
        if len(times) < 2:
            return
        self._tpot.observe((times[-1] - times[0]) / (len(times) - 1) / 1e9, exemplar)
        gaps: Any = np.diff(np.array(times, dtype=np.int64))
        if len(choice.token_steps) == len(times):  # tokens of one step have no latency between them
            gaps = gaps[np.diff(np.array(choice.token_steps, dtype=np.int64)) != 0]
        self._itl.observe_many(gaps / 1e9, exemplar)

    def _step(self, record: StepRecord) -> None:
        kind = step_kind(record)
        prefill, decode = step_tokens(record)
        seconds = (record.end_ns - record.start_ns) / 1e9
        self._steps(kind).inc()
        self._step_seconds(kind).observe(seconds)
        self._step_tokens(kind).observe(prefill + decode)
        for stage in _STEP_STAGES:
            self._step_stages(stage).inc(getattr(record, f"{stage}_ns") / 1e9)
        for phase, tokens in (("prefill", prefill), ("decode", decode)):
            if tokens:
                self._tokens_processed(phase).inc(tokens)
                self._phase_busy(phase).inc(seconds * tokens / (prefill + decode))
        self._tokens_sampled.inc(len(record.sampled_ids))
        self._evicted.inc(record.evicted_pages)
        self._queried.inc(record.prefix_queried_tokens)
        self._hits.inc(record.prefix_hit_tokens)
        if record.preempted_seq_ids:
            self._preemptions.inc(len(record.preempted_seq_ids))
            self._lost_tokens.inc(sum(record.preempted_lost))
        self._waiting.step(record)
        self._state.last_step = record

    def _lose_step(self) -> None:
        self._waiting.reset()
        self._state.last_step = None

    def _reason(self, reason: str) -> str:
        if reason not in self._reasons:
            if len(self._reasons) >= _MAX_REASONS:
                return "other"
            self._reasons.add(reason)
        return reason
