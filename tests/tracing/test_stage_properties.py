from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from tracing_factories import START_NS, arrived, closed

from inferdbg.engine.serving.events import STAGE_ENDS, Boundaries, Closed, EndKind
from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.flights import Flight
from inferdbg.tracing.reader import row_stages
from inferdbg.tracing.rows import RowContext, request_rows, to_batch
from inferdbg.tracing.schema import REQUESTS
from inferdbg.tracing.spans import SpanBuilder, make_resource, make_scope
from inferdbg.tracing.token_log import PlainIds

BUILDER = SpanBuilder(ClockPair(10**18, START_NS), make_resource("1", "0", None), make_scope("1"), "0")
CONTEXT = RowContext("0", 1, None, PlainIds(), False)


@st.composite
def ended(draw: st.DrawFn) -> Closed:
    """A request cut short after any number of stages, each of any length, closed at any time after."""
    lengths = draw(st.lists(st.integers(0, 10**12), max_size=len(STAGE_ENDS)))
    at, known = START_NS, {}
    for (_, attribute), length in zip(STAGE_ENDS, lengths, strict=False):
        at += length
        known[attribute] = at
    end = draw(st.sampled_from([EndKind.ABORTED, EndKind.FAILED, EndKind.FINISHED]))
    closed_ns = at + draw(st.integers(0, 10**12))
    return closed(
        arrived(), boundaries=Boundaries(received_ns=START_NS, **known), end=end, closed_ns=closed_ns, choices=()
    )


@given(ended())
def test_rows_and_spans_partition_the_request_without_gap_or_overlap(event: Closed) -> None:
    total = event.closed_ns - START_NS
    (row,) = to_batch(request_rows(event, CONTEXT, steps_complete=True), REQUESTS).to_pylist()
    stages = row_stages(row)
    assert sum(stage.end_ns - stage.start_ns for stage in stages) == total
    assert sum(ns for ns in row["request_stages"].values() if ns is not None) == total

    spans = BUILDER.request(event, Flight(event.arrived, 1))
    leaves = [span for span in spans[1:] if span.name != "execute"]
    assert [span.name for span in leaves] == [stage.name for stage in stages]
    assert all(_length(span) >= 0 for span in spans)
    assert sum(map(_length, leaves)) == _length(spans[0]) == total


def _length(span: ReadableSpan) -> int:
    assert span.end_time is not None
    assert span.start_time is not None
    return span.end_time - span.start_time
