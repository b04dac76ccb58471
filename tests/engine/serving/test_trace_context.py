from __future__ import annotations

import pytest

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


def test_states_are_joined_in_order():
    assert parse(f"00-{TRACE}-{SPAN}-01", state=("a=1,b=2", "c=3")).tracestate == "a=1,b=2,c=3"
    assert parse(f"00-{TRACE}-{SPAN}-01", state=("a=" + "x" * 600,)).tracestate is None
