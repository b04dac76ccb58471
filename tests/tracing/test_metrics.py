from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tracing_factories import MS, START_NS, Script, arrived, boundaries, choice, closed, core_started, rejected, step

from inferdbg.engine.core.events import FinishReason, StepFailed, WaitReason
from inferdbg.engine.serving.events import EndKind, EngineLost
from inferdbg.tracing.catalog import METRICS, MetricKind
from inferdbg.tracing.losses import Losses
from inferdbg.tracing.metrics import Metrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def make():
    def build(**changes):
        losses = Losses()
        arguments = {
            "replica": "r0", "model": "tiny", "version": "1.2", "dropped": losses.counts,
            "cpu_seconds": lambda: {"record": 1.5}, "loop_lag": lambda: 0.25, "num_slots": 16,
            "clock": lambda: START_NS + 500 * MS, "wall_ns": lambda ns: ns - START_NS + 10**18,
        }  # fmt: skip
        return Metrics(**(arguments | changes))

    return build


def feed(metrics, *events):
    for event in events:
        metrics(event)

    def value(name, **labels):
        return metrics.registry.get_sample_value(f"inferdbg_{name}", {"replica": "r0"} | labels)

    return value


def test_latencies_are_those_of_the_definitions(make):
    value = feed(make(), arrived(), closed())
    assert value("time_to_first_token_seconds_sum") == pytest.approx(0.016)
    assert value("request_duration_seconds_sum", end="finished") == pytest.approx(0.059)
    assert value("queue_time_seconds_sum") == pytest.approx(0.003)
    assert value("inter_token_latency_seconds_count") == 2
    assert value("inter_token_latency_seconds_sum") == pytest.approx(0.040)
    assert value("time_per_output_token_seconds_sum") == pytest.approx(0.020)
    stages = {s: value("request_stage_seconds_total", stage=s) for s in ("schedule", "prefill", "decode", "io.send")}
    assert stages == pytest.approx({"schedule": 0.003, "prefill": 0.010, "decode": 0.040, "io.send": 0.002})
    assert value("request_busy_seconds_total", work="detokenize") == pytest.approx(0.003)


def test_stage_seconds_add_up_to_the_durations(make):
    metrics = make()
    cut = boundaries(last_token_ns=None, text_ready_ns=None, sent_ns=None)
    late = closed(arrived("c"), closed_ns=START_NS + 90 * MS)
    aborted = closed(arrived("b"), end=EndKind.ABORTED, boundaries=cut, closed_ns=START_NS + 40 * MS)
    value = feed(metrics, closed(), late, aborted)
    family = next(f for f in metrics.registry.collect() if f.name == "inferdbg_request_stage_seconds")
    total = sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
    durations = sum(value("request_duration_seconds_sum", end=end) for end in ("finished", "aborted"))
    assert total == pytest.approx(durations) == pytest.approx(0.059 + 0.090 + 0.040)


def test_tokens_of_one_step_have_no_latency_between_them(make):
    times = tuple(START_NS + ms * MS for ms in (16, 16, 36, 36))
    record = choice((1, 2, 3, 4), token_times_ns=times, token_steps=(1, 1, 2, 2))
    value = feed(make(), closed(choices=(record,)))
    assert value("inter_token_latency_seconds_count") == 1
    assert value("inter_token_latency_seconds_sum") == pytest.approx(0.020)


def test_every_end_is_counted(make):
    value = feed(
        make(),
        rejected(),
        closed(arrived("a")),
        closed(arrived("b"), end=EndKind.ABORTED, choices=(choice(finish_reason=FinishReason.ABORT),)),
        closed(arrived("c"), end=EndKind.FAILED, choices=(choice(finish_reason=None),)),
        closed(arrived("d"), end=EndKind.REJECTED, error_type="too_large", choices=()),
    )
    ends = {end.value: value("requests_closed_total", end=end.value) for end in EndKind}
    assert ends == {"finished": 1, "aborted": 1, "rejected": 2, "failed": 1}
    assert value("requests_rejected_total", reason="queue_full") == 1
    assert value("requests_rejected_total", reason="too_large") == 1
    reasons = {r: value("choices_finished_total", finish_reason=r) for r in ("stop", "abort", "none", "length")}
    assert reasons == {"stop": 1, "abort": 1, "none": 1, "length": 0}


def test_who_was_never_accepted_counts_as_it_ended(make):
    ends = (EndKind.ABORTED, EndKind.FAILED, EndKind.FAILED)
    value = feed(make(), *(rejected(f"r{n}", end=end, reason="x") for n, end in enumerate(ends)))
    counted = {end.value: value("requests_closed_total", end=end.value) for end in EndKind}
    assert counted == {"finished": 0, "aborted": 1, "rejected": 0, "failed": 2}
    assert value("requests_rejected_total", reason="x") is None


def test_what_the_scheduler_has_not_seen_waits_too(make):
    metrics = make()
    early = arrived("a", time_ns=START_NS + 100 * MS, prompts=((1, 2), (3,)), seq_ids=(0, 1))
    value = feed(metrics, core_started(1), early, arrived("b", time_ns=START_NS + 200 * MS, seq_ids=(2,)))
    # no step at all: the core loads, or stalls
    assert (value("requests_waiting", reason="unseen"), value("waiting_tokens", reason="unseen")) == (3, 2 + 1 + 4)
    assert value("oldest_waiting_seconds") == pytest.approx(0.4)
    line = {"waiting_reasons": (WaitReason.SLOTS,), "waiting_requests": (1,), "waiting_tokens": (1,)}
    admitted = {"admitted_seq_ids": (0,), "admitted_cached": (0,), "admitted_is_resume": (False,)}
    record = step(1, (0,), **line, **admitted, oldest_waiting_ns=START_NS + 150 * MS)
    feed(metrics, record, arrived("c", time_ns=START_NS + 300 * MS, prompts=((1,) * 9,), seq_ids=(3,)))
    # of 1, 2 and 3 the step saw one: the first of them
    assert (value("requests_waiting", reason="slots"), value("requests_waiting", reason="unseen")) == (1, 2)
    assert (value("waiting_tokens", reason="slots"), value("waiting_tokens", reason="unseen")) == (1, 4 + 9)
    assert value("oldest_waiting_seconds") == pytest.approx(0.4)  # of the prompt that came with the admitted one
    feed(metrics, closed(early, end=EndKind.ABORTED))
    assert value("oldest_waiting_seconds") == pytest.approx(0.35)  # as of the last step


def test_a_sequence_that_waits_again_or_is_paused_hides_nobody_that_is_unseen(make):
    metrics = make()
    feed(metrics, arrived("a", seq_ids=(0,)), arrived("b", seq_ids=(1,)), step(1, (0, 1)))
    reasons = (WaitReason.PAGES, WaitReason.CREDIT)
    line = {"waiting_reasons": reasons, "waiting_requests": (1, 1), "waiting_tokens": (5, 1)}
    record = step(2, (0,), preempted_seq_ids=(1,), preempted_lost=(4,), **line)
    value = feed(metrics, record, arrived("c", seq_ids=(2,)))
    assert value("requests_waiting", reason="unseen") == 1
    feed(metrics, step(3, (0, 1, 2), waiting_reasons=(), waiting_requests=(), waiting_tokens=()))
    assert value("requests_waiting", reason="unseen") == 0


def test_a_core_that_is_lost_has_seen_nobody(make):
    lost = EngineLost(incarnation=1, time_ns=0, reason="x", request_ids=())
    value = feed(make(), arrived("a", seq_ids=(0,)), step(1, (7,), waiting_requests=(1,), waiting_tokens=(4,)), lost)
    assert (value("requests_waiting", reason="unseen"), value("requests_waiting", reason="slots")) == (1, 0)


def test_rejection_reasons_are_bounded(make):
    value = feed(make(), *(rejected(f"r{n}", reason=f"made up {n}") for n in range(100)))
    assert value("requests_closed_total", end="rejected") == 100
    assert value("requests_rejected_total", reason="other") > 50


def test_steps_are_counted_by_kind_stage_and_phase(make):
    mixed = step(1, (0, 1, 2), prefill=6, preempted_seq_ids=(9,), preempted_lost=(40,), evicted_pages=3,
                 prefix_queried_tokens=20, prefix_hit_tokens=16)  # fmt: skip
    failed = StepFailed(step=3, time_ns=0, stage="execute", error="x", seq_ids=())
    value = feed(make(), mixed, step(2, (0,)), failed)
    assert (value("steps_total", kind="mixed"), value("steps_total", kind="decode")) == (1, 1)
    assert value("step_seconds_sum", kind="mixed") == pytest.approx(0.017)
    assert value("step_tokens_sum", kind="mixed") == 8
    assert (value("tokens_processed_total", phase="prefill"), value("tokens_processed_total", phase="decode")) == (6, 3)
    assert value("phase_busy_seconds_total", phase="prefill") == pytest.approx(0.017 * 6 / 8)
    assert value("step_stage_seconds_total", stage="execute") == pytest.approx(0.024)
    assert value("step_stage_seconds_total", stage="idle") == pytest.approx(0.002)
    assert (value("preemptions_total"), value("preemption_lost_tokens_total")) == (1, 40)
    assert (value("prefix_cache_queried_tokens_total"), value("prefix_cache_hit_tokens_total")) == (20, 16)
    assert (value("pages_evicted_total"), value("steps_failed_total", stage="execute")) == (3, 1)


def test_gauges_are_those_of_the_last_step(make):
    waiting = step(2, (0, 1), waiting_reasons=(WaitReason.PAGES, WaitReason.ORDER), waiting_requests=(1, 4),
                   waiting_tokens=(100, 900), oldest_waiting_ns=START_NS + 100 * MS)  # fmt: skip
    value = feed(make(), arrived(), step(1), waiting)
    assert (value("requests_waiting", reason="pages"), value("requests_waiting", reason="order")) == (1, 4)
    assert (value("waiting_tokens", reason="order"), value("requests_waiting", reason="slots")) == (900, 0)
    assert value("oldest_waiting_seconds") == pytest.approx(0.4)
    assert (value("sequences_running"), value("requests_in_flight"), value("slots")) == (2, 1, 16)
    assert [value("pages", state=state) for state in ("free", "used", "cached")] == [90, 8, 2]
    assert value("last_step_timestamp_seconds") == pytest.approx(10**9 + (waiting.end_ns - START_NS) / 1e9)


def test_no_gauge_goes_stale_when_everything_ends_without_a_step(make):
    value = feed(make(), arrived(), step(1), closed(end=EndKind.ABORTED))
    assert (value("sequences_running"), value("requests_waiting", reason="slots")) == (0, 0)
    assert (value("oldest_waiting_seconds"), value("requests_in_flight")) == (0, 0)
    assert value("pages", state="free") == 90


def test_a_lost_core_is_counted_and_its_gauges_go(make):
    lost = EngineLost(incarnation=1, time_ns=0, reason="x", request_ids=())
    value = feed(make(), core_started(1), arrived(), step(1), lost, core_started(2))
    assert (value("engine_lost_total"), value("engine_incarnation")) == (1, 2)
    assert value("pages", state="free") is None
    assert value("requests_in_flight") == 1


def test_what_others_count_is_shown(make):
    losses = Losses()
    losses.add("steps", 7)
    value = feed(make(dropped=losses.counts))
    assert value("telemetry_dropped_total", signal="steps") == 7
    assert value("telemetry_dropped_total", signal="spans") == 0
    assert value("instrumentation_seconds_total", place="record") == 1.5
    assert value("event_loop_lag_seconds") == 0.25


def test_the_replica_label_can_have_another_name(make):
    metrics = make(replica_label="engine")
    feed(metrics, arrived(), step(1), closed())
    for family in metrics.registry.collect():
        for sample in family.samples:
            assert sample.labels["engine"] == "r0"
            assert "replica" not in sample.labels


def test_the_slo_is_a_gauge_and_an_edge(make):
    value = feed(make(slo_ttft_seconds=0.3), closed())
    assert value("slo_ttft_seconds") == 0.3
    assert value("time_to_first_token_seconds_bucket", le="0.3") == 1
    assert feed(make())("slo_ttft_seconds") is None


def test_exemplars_name_the_trace_in_openmetrics_only(make):
    metrics = make()
    feed(metrics, closed())
    body, content_type = metrics.response(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    exemplars = {
        (sample.name, sample.exemplar.labels["trace_id"])
        for family in parse_openmetrics(body.decode())
        for sample in family.samples
        if sample.exemplar
    }
    trace_id = arrived().trace.trace_id
    for name in ("time_to_first_token", "request_duration", "inter_token_latency", "queue_time"):
        assert (f"inferdbg_{name}_seconds_bucket", trace_id) in exemplars
    text, content_type = metrics.response("text/plain")
    assert content_type.startswith("text/plain")
    assert b"trace_id" not in text


def test_the_catalog_and_the_exposition_have_the_same_metrics(make):
    metrics = make(slo_ttft_seconds=0.3)
    feed(metrics, *Script().run(), rejected())
    exposed = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in parse_text(metrics.response(None)[0].decode())
        if not family.name.endswith("_created")
    }
    assert set(exposed) == {spec.name for spec in METRICS}
    for spec in METRICS:
        family = exposed[spec.name]
        assert (family.type, family.documentation) == (spec.kind.value, spec.help)
        wanted = {"replica", *spec.labels} | ({"le"} if spec.kind is MetricKind.HISTOGRAM else set())
        names = {name for sample in family.samples for name in sample.labels} or wanted
        assert names == wanted


def test_promtool_finds_nothing_to_say(make, require_tool):
    promtool = require_tool("promtool")
    metrics = make(slo_ttft_seconds=0.3)
    feed(metrics, *Script().run(), rejected(), replace(step(9), graph_bucket=4))
    done = subprocess.run(
        [promtool, "check", "metrics"], input=metrics.response("text/plain")[0], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
