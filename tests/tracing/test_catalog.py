from __future__ import annotations

import re

import pytest

from inferdbg.engine.serving.events import STAGE_ENDS, EndKind
from inferdbg.tracing.catalog import (
    ATTRIBUTES,
    DEFINITIONS,
    EVENTS,
    METRICS,
    SPANS,
    MetricKind,
    buckets_with_slo,
    metric,
)


@pytest.mark.parametrize(
    "specs", [METRICS, SPANS, ATTRIBUTES, EVENTS], ids=["metrics", "spans", "attributes", "events"]
)
def test_names_are_unique_and_explained(specs):
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names))
    assert all(spec.help for spec in specs)


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_metrics_follow_the_naming_conventions(spec):
    assert re.fullmatch(r"inferdbg_[a-z_]+", spec.name)
    assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
    if spec.unit == "seconds":
        assert spec.name.removesuffix("_total").endswith("_seconds")
    assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM)
    assert list(spec.buckets) == sorted(set(spec.buckets))


def test_every_stage_and_end_is_defined():
    for name in [stage for stage, _ in STAGE_ENDS] + [end.value for end in EndKind] + ["TTFT", "ITL", "TPOT", "E2E"]:
        assert DEFINITIONS[name].endswith(".")


def test_every_stage_of_a_request_has_a_span_under_the_root_or_execute():
    parents = {span.name: span.parent for span in SPANS}
    for stage, _ in STAGE_ENDS:
        assert parents[stage] == ("execute" if stage in ("prefill", "decode") else "chat | text_completion")


def test_the_slo_becomes_a_bucket_edge_once():
    spec = metric("inferdbg_time_to_first_token_seconds")
    assert buckets_with_slo(spec, None) == spec.buckets
    assert buckets_with_slo(spec, 0.5) == spec.buckets
    edges = buckets_with_slo(spec, 0.3)
    assert edges == tuple(sorted({*spec.buckets, 0.3}))
    assert min(spec.buckets) == 0.001
