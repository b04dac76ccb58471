from __future__ import annotations

import hashlib

import pytest
from tracing_factories import trace_context

from inferdbg.engine.errors import UsageError
from inferdbg.tracing.sampling import ALL_TRACES, SampleRule, parse_sample_rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("all", ALL_TRACES),
        ("errors,slow>1s,1%", SampleRule(errors=True, slow_seconds=1.0, ratio=0.01)),
        ("slow>250ms", SampleRule(slow_seconds=0.25, ratio=0.0)),
        (" 12.5% , errors", SampleRule(errors=True, ratio=0.125)),
        ("100%", SampleRule(ratio=1.0)),
        ("slow>2m", SampleRule(slow_seconds=120.0, ratio=0.0)),
    ],
)
def test_rules_are_read(text, rule):
    assert parse_sample_rule(text) == rule


@pytest.mark.parametrize(
    "text", ["", "1", "101%", "-1%", "slow>1", "slow<1s", "errors,errors", "1%,2%", "some", "errors,"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(UsageError, match="--otlp-sample"):
        parse_sample_rule(text)


def test_errors_and_slow_requests_are_taken_whatever_the_draw():
    rule = parse_sample_rule("errors,slow>1s,0%")
    trace = trace_context("x")
    assert rule.takes(trace, is_error=True, seconds=0.1)
    assert rule.takes(trace, is_error=False, seconds=1.1)
    assert not rule.takes(trace, is_error=False, seconds=1.0)


def test_the_percentage_is_drawn_from_the_trace_id():
    rule = parse_sample_rule("10%")
    taken = [name for name in map(str, range(5000)) if rule.takes(trace_context(name), is_error=False, seconds=0)]
    assert 400 < len(taken) < 600
    assert all(rule.takes(trace_context(name), is_error=False, seconds=9) for name in taken)
    wider = parse_sample_rule("20%")
    assert all(wider.takes(trace_context(name), is_error=False, seconds=0) for name in taken)


def test_a_caller_that_does_not_sample_is_respected_by_the_percentage_alone():
    trace = trace_context("x", parent_span_id="00000000000000aa", sampled=False)
    assert not ALL_TRACES.takes(trace, is_error=False, seconds=0)
    assert parse_sample_rule("errors").takes(trace, is_error=True, seconds=0)
    sampled = trace_context("x", parent_span_id="00000000000000aa", sampled=True)
    assert not parse_sample_rule("0%").takes(sampled, is_error=False, seconds=0)
    assert hashlib.sha256(b"x").hexdigest()[:32] == trace.trace_id
