"""Metrics that are computed when they are asked for. Knows no event: `Metrics` keeps the state it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from inferdbg.engine.core.events import StepRecord, WaitReason
from inferdbg.tracing.catalog import MetricKind, metric
from inferdbg.tracing.waiting import UNSEEN, WaitingLine

__all__ = ["ScrapeCollector", "ScrapeState"]


@dataclass(slots=True)
class ScrapeState:
    """Written by the recording thread, read at a scrape; each field is replaced whole, or guards itself."""

    num_slots: int | None
    slo_ttft_seconds: float | None
    waiting: WaitingLine
    last_step: StepRecord | None = None
    num_in_flight: int = 0
    incarnation: int = 0


class ScrapeCollector(Collector):
    """Gauges from the last step and what is in flight or waits since; counters that others keep."""

    def __init__(
        self,
        state: ScrapeState,
        *,
        replica: tuple[str, str],
        dropped: Callable[[], Mapping[str, int]],
        cpu_seconds: Callable[[], Mapping[str, float]],
        loop_lag: Callable[[], float] | None,
        wall_ns: Callable[[int], int],
        clock: Callable[[], int],
    ) -> None:
        self._state = state
        self._label, self._replica = replica
        self._dropped = dropped
        self._cpu_seconds = cpu_seconds
        self._loop_lag = loop_lag
        self._wall_ns = wall_ns
        self._clock = clock

    def describe(self) -> list[Metric]:
        """Nothing: registration must not call what may not be ready yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._state
        # When nothing is in flight nothing waits or runs, whatever the last step said.
        step = state.last_step
        busy = step if state.num_in_flight else None
        yield self._family("requests_in_flight", {(): state.num_in_flight})
        yield self._family("sequences_running", {(): busy.num_running if busy else 0})
        yield from self._waiting(busy)
        if state.num_slots is not None:
            yield self._family("slots", {(): state.num_slots})
        if step is not None:
            pages = {"free": step.pages_free, "used": step.pages_used, "cached": step.pages_cached}
            yield self._family("pages", {(name,): count for name, count in pages.items()})
            yield self._family("step_token_budget", {(): step.token_budget})
        ended = self._wall_ns(step.end_ns) / 1e9 if step is not None else 0.0
        yield self._family("last_step_timestamp_seconds", {(): ended})
        yield self._family("engine_incarnation", {(): state.incarnation})
        if self._loop_lag is not None:
            yield self._family("event_loop_lag_seconds", {(): self._loop_lag()})
        if state.slo_ttft_seconds is not None:
            yield self._family("slo_ttft_seconds", {(): state.slo_ttft_seconds})
        yield self._family("telemetry_dropped_total", {(k,): v for k, v in self._dropped().items()})
        yield self._family("instrumentation_seconds_total", {(k,): v for k, v in self._cpu_seconds().items()})

    def _waiting(self, step: StepRecord | None) -> Iterator[Metric]:
        unseen = self._state.waiting.unseen()
        requests: dict[tuple[str, ...], float] = {(reason.value,): 0 for reason in WaitReason}
        requests[(UNSEEN,)] = unseen.num_sequences
        tokens: dict[tuple[str, ...], float] = dict.fromkeys(requests, 0.0)
        tokens[(UNSEEN,)] = unseen.num_tokens
        since = [unseen.oldest_ns]
        if step is not None:
            columns = zip(step.waiting_reasons, step.waiting_requests, step.waiting_tokens, strict=True)
            for reason, num_requests, num_tokens in columns:
                requests[(str(reason),)] = num_requests
                tokens[(str(reason),)] = num_tokens
            since.append(step.oldest_waiting_ns)
        oldest_ns = min((time_ns for time_ns in since if time_ns is not None), default=None)
        oldest = 0.0 if oldest_ns is None else max(0, self._clock() - oldest_ns) / 1e9
        yield self._family("requests_waiting", requests)
        yield self._family("waiting_tokens", tokens)
        yield self._family("oldest_waiting_seconds", {(): oldest})

    def _family(self, name: str, values: Mapping[tuple[str, ...], float]) -> Metric:
        spec = metric(f"inferdbg_{name}")
        labels = (self._label, *spec.labels)
        family: GaugeMetricFamily | CounterMetricFamily
        if spec.kind is MetricKind.COUNTER:
            family = CounterMetricFamily(spec.name, spec.help, labels=labels)
        else:
            family = GaugeMetricFamily(spec.name, spec.help, labels=labels)
        for key, value in values.items():
            family.add_metric((self._replica, *key), value)
        return family
