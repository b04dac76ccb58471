from __future__ import annotations

import pytest
from opentelemetry.trace.span import TraceState

from inferdbg.engine.serving.trace_context import trace_context_from_headers

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def parse(*values, state=()):
    headers = [(b"traceparent", value.encode()) for value in values]
    return trace_context_from_headers([*headers, *((b"tracestate", value.encode()) for value in state)])


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f" 00-{TRACE}-{SPAN}-01 ", True),
        (f"01-{TRACE}-{SPAN}-01-future", True),
    ],
)
def test_a_valid_parent_is_continued(value, sampled):
    context = parse(value)
    assert (context.trace_id, context.parent_span_id, context.sampled) == (TRACE, SPAN, sampled)
    assert context.span_id not in (SPAN, "0" * 16)
    assert len(context.span_id) == 16


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("",),
        ("nonsense",),
        (f"00-{TRACE}-{SPAN}",),
        (f"ff-{TRACE}-{SPAN}-01",),
        (f"00-{TRACE}-{SPAN}-01-more",),
        (f"00-{'0' * 32}-{SPAN}-01",),
        (f"00-{TRACE}-{'0' * 16}-01",),
        (f"00-{TRACE.upper()}-{SPAN}-01",),
        (f"00-{TRACE}-{SPAN}-0g",),
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
    ],
)
def test_anything_else_begins_a_trace(values):
    context = parse(*values, state=("a=1",))
    assert context.parent_span_id is None
    assert context.tracestate is None
    assert context.trace_id != TRACE
    assert len(context.trace_id) == 32
    assert parse(*values).trace_id != context.trace_id


@pytest.mark.parametrize(
    "state",
    [
        ("secret text",), ("a=1,secret",), ("a=1", "=x"), ("A=1",), ("a=",), ("a=1=2",), ("a=1,a=2",), ("a=\u00e4",),
        ("a b=1",), ("a=\x01",), (",".join(f"k{n}=1" for n in range(33)),), ("1a=1",), ("a@1=1",),
    ],
)  # fmt: skip
def test_a_malformed_state_is_dropped_and_says_nothing(state, caplog):
    context = parse(f"00-{TRACE}-{SPAN}-01", state=state)
    assert context.tracestate is None
    assert context.trace_id == TRACE


@pytest.mark.parametrize("state", ["a=1", "fw529a3039@dt=FfK:7@!", "a=1,,\tb=x y , c=3", "a-b*c/d_0=~"])
def test_a_state_that_is_kept_is_one_that_tracing_libraries_take(state, caplog):
    kept = parse(f"00-{TRACE}-{SPAN}-01", state=(state,)).tracestate
    assert kept is not None
    assert TraceState.from_header([kept]).to_header() == kept
    assert caplog.records == []


def test_states_are_joined_in_order():
    assert parse(f"00-{TRACE}-{SPAN}-01", state=("a=1,b=2", "c=3")).tracestate == "a=1,b=2,c=3"
    assert parse(f"00-{TRACE}-{SPAN}-01", state=("a=" + "x" * 600,)).tracestate is None
