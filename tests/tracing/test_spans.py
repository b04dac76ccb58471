from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.trace import SpanKind, StatusCode
from tracing_factories import MS, START_NS, Script, arrived, boundaries, choice, closed, rejected, step, trace_context

from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.errors import InvalidRequest
from inferdbg.engine.serving.events import Boundaries, EndKind
from inferdbg.tracing.catalog import ATTRIBUTES, EVENTS, SPANS
from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.flights import Flights
from inferdbg.tracing.otlp_json import LineEncoder
from inferdbg.tracing.spans import ServerAddress, SpanBuilder, make_resource, make_scope
from inferdbg.tracing.step_window import StepWindow

CLOCK = ClockPair(1_796_000_000_000_000_000, START_NS)
RESOURCE, SCOPE = make_resource("1.2", "r0", "a-run"), make_scope("1.2")


@pytest.fixture
def builder():
    return SpanBuilder(CLOCK, RESOURCE, SCOPE, "r0", ServerAddress("127.0.0.1", 8000))


def tree(builder, event, *records):
    flights = Flights()
    flights.open(event.arrived)
    for record in records:
        flights.step(record)
    return builder.request(event, flights.close(event))


def named(spans):
    return {span.name: span for span in spans}


def parse_lines(text: str) -> list[TracesData]:
    """OTLP/JSON by protobuf's own parser, which wants ids in base64 where OTLP has hex."""

    def convert(node: Any, key: str = "") -> Any:
        if isinstance(node, dict):
            return {name: convert(value, name) for name, value in node.items()}
        if isinstance(node, list):
            return [convert(item) for item in node]
        is_id = key in ("traceId", "spanId", "parentSpanId")
        return base64.b64encode(bytes.fromhex(node)).decode() if is_id else node

    return [json_format.ParseDict(convert(json.loads(line)), TracesData()) for line in text.splitlines()]


def test_the_tree_of_a_request_has_its_stages_with_their_real_times(builder):
    spans = tree(builder, closed())
    by_name = named(spans)
    assert [span.name for span in spans] == [
        "chat tiny", "io.receive", "tokenize", "schedule", "execute", "prefill", "decode", "detokenize", "io.send"
    ]  # fmt: skip
    root = spans[0]
    assert root.kind is SpanKind.SERVER
    assert root.status.status_code is StatusCode.OK
    assert (root.start_time, root.end_time) == (CLOCK.wall_ns, CLOCK.wall_ns + 59 * MS)
    assert by_name["prefill"].start_time == CLOCK.wall_ns + 6 * MS
    assert by_name["execute"].end_time == by_name["decode"].end_time == CLOCK.wall_ns + 56 * MS
    for span in spans[1:]:
        parent = by_name["execute"] if span.name in ("prefill", "decode") else root
        assert span.parent.span_id == parent.context.span_id
        assert span.context.trace_id == root.context.trace_id
    assert len({span.context.span_id for span in spans}) == len(spans)


def test_ids_are_those_given_out_early_and_the_caller_is_the_parent(builder):
    trace = trace_context("x", parent_span_id="00f067aa0ba902b7", tracestate="vendor=abc")
    (root, *_) = tree(builder, closed(arrived(trace=trace)))
    assert f"{root.context.trace_id:032x}" == trace.trace_id
    assert f"{root.context.span_id:016x}" == trace.span_id
    assert f"{root.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert root.parent.is_remote
    assert root.context.trace_state.to_header() == "vendor=abc"
    assert tree(builder, closed())[0].parent is None


def test_attributes_carry_the_current_conventions(builder):
    sampling = SamplingParams(max_tokens=9, n=2, temperature=0.0, top_k=40, seed=3, presence_penalty=0.5)
    arrival = arrived(endpoint="/v1/completions", sampling=sampling, client_request_id="mine", seq_ids=(0, 1))
    choices = (choice((1, 2)), choice((3,), choice_index=1, seq_id=1, cached_tokens=1))
    attributes = tree(builder, closed(arrival, choices=choices))[0].attributes
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "inferdbg", "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.0, "gen_ai.request.top_k": 40, "gen_ai.request.choice.count": 2,
        "gen_ai.request.seed": 3, "gen_ai.request.presence_penalty": 0.5, "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop", "stop"), "gen_ai.response.time_to_first_chunk": 0.016,
        "inferdbg.ttft_seconds": 0.016, "inferdbg.client_request_id": "mine", "inferdbg.end": "finished",
        "server.address": "127.0.0.1", "server.port": 8000, "http.response.status_code": 200,
    }  # fmt: skip
    assert {key: attributes[key] for key in expected} == expected
    assert "gen_ai.request.frequency_penalty" not in attributes
    assert "error.type" not in attributes


@pytest.mark.parametrize(
    ("end", "error_type", "expected"),
    [(EndKind.ABORTED, "client_disconnected", "client_disconnected"), (EndKind.FAILED, None, "failed")],
)
def test_every_end_but_finished_is_an_error_with_a_type_in_the_stage_it_was_cut_in(builder, end, error_type, expected):
    bounds = Boundaries(received_ns=START_NS, parsed_ns=START_NS + MS, tokenized_ns=START_NS + 2 * MS)
    event = closed(boundaries=bounds, end=end, error_type=error_type, choices=(), closed_ns=START_NS + 9 * MS)
    spans = tree(builder, event)
    assert [span.name for span in spans] == ["chat tiny", "io.receive", "tokenize", "schedule"]
    assert spans[0].status.status_code is StatusCode.ERROR
    assert spans[0].attributes["error.type"] == expected
    assert spans[0].end_time == spans[-1].end_time == CLOCK.wall_ns + 9 * MS


def test_cached_tokens_count_once_a_prompt_as_they_do_for_the_client(builder):
    arrival = arrived(prompts=((1, 2), (3, 4)), sampling=SamplingParams(n=2, seed=1), seq_ids=(0, 1, 2, 3))
    found = ((0, 0, 16), (0, 1, 32), (1, 0, None), (1, 1, 48))
    choices = tuple(choice(prompt_index=p, choice_index=c, cached_tokens=n) for p, c, n in found)
    assert tree(builder, closed(arrival, choices=choices))[0].attributes["gen_ai.usage.cache_read.input_tokens"] == 16


def test_a_choice_without_a_finish_reason_is_given_none(builder):
    reason = "gen_ai.response.finish_reasons"
    cut = choice((3,), choice_index=1, finish_reason=None)
    assert tree(builder, closed(choices=(choice(), cut)))[0].attributes[reason] == ("stop",)
    assert reason not in tree(builder, closed(choices=(cut,), end=EndKind.ABORTED))[0].attributes
    assert reason not in tree(builder, closed(choices=(), end=EndKind.FAILED))[0].attributes


@pytest.mark.parametrize("end", [EndKind.ABORTED, EndKind.FAILED])
def test_a_request_cut_short_before_it_was_accepted_says_how_and_where(builder, end):
    bounds = Boundaries(received_ns=START_NS, parsed_ns=START_NS + MS)
    root, *stages = builder.rejected(rejected(end=end, boundaries=bounds, closed_ns=START_NS + 4 * MS))
    assert root.attributes["inferdbg.end"] == end.value
    assert root.status.status_code is StatusCode.ERROR
    assert [(s.name, s.end_time - CLOCK.wall_ns) for s in stages] == [("io.receive", MS), ("tokenize", 4 * MS)]
    assert root.end_time == stages[-1].end_time


def test_a_rejected_request_has_a_root_with_its_reason(builder):
    root, child = builder.rejected(rejected())
    assert (root.name, child.name) == ("text_completion", "io.receive")
    assert root.attributes["error.type"] == "queue_full"
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["http.response.status_code"] == 429


def test_preemptions_and_cache_hits_are_events_on_execute(builder):
    admitted = step(1, admitted_seq_ids=(0,), admitted_cached=(32,), admitted_is_resume=(False,))
    preempted = step(2, preempted_seq_ids=(0, 99), preempted_lost=(40, 1))
    resumed = step(3, admitted_seq_ids=(0,), admitted_cached=(16,), admitted_is_resume=(True,))
    execute = named(tree(builder, closed(), admitted, preempted, resumed))["execute"]
    assert [(event.name, dict(event.attributes)) for event in execute.events] == [
        ("inferdbg.prefix_cache.hit",
         {"inferdbg.step": 1, "inferdbg.cached_tokens": 32, "inferdbg.prompt_index": 0, "inferdbg.choice_index": 0}),
        ("inferdbg.preempted",
         {"inferdbg.step": 2, "inferdbg.lost_tokens": 40, "inferdbg.prompt_index": 0, "inferdbg.choice_index": 0}),
        ("inferdbg.resumed",
         {"inferdbg.step": 3, "inferdbg.cached_tokens": 16, "inferdbg.prompt_index": 0, "inferdbg.choice_index": 0}),
    ]  # fmt: skip
    assert execute.events[1].timestamp == CLOCK.wall(preempted.start_ns)


def test_a_step_is_a_trace_of_its_own_linked_to_its_requests(builder):
    flights = Flights()
    flight = flights.open(arrived())
    record = step(7, (0,), prefill=5, graph_bucket=8)
    root, *stages = builder.step(record, [flight])
    assert [span.name for span in stages] == [
        "step.schedule", "step.prepare", "step.execute", "step.sample", "step.publish"
    ]  # fmt: skip
    assert f"{root.links[0].context.span_id:016x}" == flight.arrived.trace.span_id
    assert root.attributes["inferdbg.step.kind"] == "prefill"
    assert root.attributes["inferdbg.step.graph_bucket"] == 8
    assert stages[2].end_time - stages[2].start_time == 12 * MS
    assert stages[-1].end_time == root.end_time == CLOCK.wall(record.end_ns)


def test_every_name_is_in_the_catalog_and_no_token_or_text_is_in_a_span(builder):
    arrival = arrived(
        prompts=((40961, 40962),), prompt_text="secret", sampling=SamplingParams(seed=1, stop=("secret",)),
        replay_of="r", service_class="gold", client_request_id="c",
    )  # fmt: skip
    hit = step(1, admitted_seq_ids=(0,), admitted_cached=(32,), admitted_is_resume=(False,))
    event = closed(arrival, choices=(choice((40963,), output_text="secret"),), error="secret", end=EndKind.FAILED)
    spans = [*tree(builder, event, hit), *builder.step(step(1), []), *builder.rejected(rejected())]
    known = {spec.name for spec in ATTRIBUTES}
    for span in spans:
        assert span.name.split(" ")[0] in {spec.name for spec in SPANS}
        assert set(span.attributes) <= known
        for span_event in span.events:
            assert span_event.name in {spec.name for spec in EVENTS}
            assert set(span_event.attributes) <= known
    line = LineEncoder(RESOURCE, SCOPE).line(spans).decode()
    assert not any(secret in line for secret in ("secret", "40961", "40963"))


def test_the_json_lines_are_what_the_protobuf_encoder_says(builder):
    trace = trace_context("x", parent_span_id="00f067aa0ba902b7", tracestate="vendor=abc")
    hit = step(1, admitted_seq_ids=(0,), admitted_cached=(32,), admitted_is_resume=(False,))
    event = closed(arrived(trace=trace), end=EndKind.FAILED, error_type="engine_lost")
    flights = Flights()
    spans = [*tree(builder, event, hit), *builder.step(step(1), [flights.open(arrived())])]
    line = LineEncoder(RESOURCE, SCOPE).line(spans).decode()
    assert line.endswith("\n")
    (parsed,) = parse_lines(line)
    wanted = encode_spans(spans).resource_spans[0]
    for span in wanted.scope_spans[0].spans:
        if not span.status.ByteSize():
            span.ClearField("status")  # unset is written as an empty message there, and not at all here
    found = parsed.resource_spans[0]
    assert list(found.scope_spans[0].spans) == list(wanted.scope_spans[0].spans)
    assert found.resource == wanted.resource
    assert found.scope_spans[0].scope == wanted.scope_spans[0].scope


def test_a_lone_surrogate_from_a_client_does_not_break_the_encoding(builder):
    spans = tree(builder, closed(arrived(model="m\ud800", client_request_id="\udfff")))
    assert parse_lines(LineEncoder(RESOURCE, SCOPE).line(spans).decode())
    assert encode_spans(spans).resource_spans


def test_the_service_name_is_ours_unless_the_environment_says_otherwise(monkeypatch):
    assert RESOURCE.attributes["service.name"] == "inferdbg"
    assert RESOURCE.attributes["inferdbg.run"] == "a-run"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "placards")
    assert make_resource("1", "r", None).attributes["service.name"] == "placards"


def test_all_spans_of_a_run_are_in_its_files(start):
    recording = start()
    script = Script(num_requests=3, num_tokens=2)
    for event in [*script.run(), rejected()]:
        recording.observer(event)
    assert recording.flush()
    (path,) = (recording.run_dir / "spans").iterdir()
    assert path.name == "0.1.000000.jsonl"
    spans = [s for data in parse_lines(path.read_text()) for s in data.resource_spans[0].scope_spans[0].spans]
    assert [s.name for s in spans if not s.parent_span_id] == ["chat tiny"] * 3 + ["text_completion"]
    assert not any(s.name == "step" for s in spans)


def test_step_spans_come_only_while_the_window_is_open(start):
    recording = start()
    now = [START_NS]
    recording.step_window._clock = lambda: now[0]
    recording.observer(arrived(seq_ids=(0,)))
    recording.observer(step(0))
    recording.flush()
    recording.step_window.open(0.05)
    for number in (1, 2, 3):  # 20 ms apart
        recording.observer(step(number))
    recording.flush()
    text = "".join(path.read_text() for path in (recording.run_dir / "spans").iterdir())
    spans = [s for data in parse_lines(text) for s in data.resource_spans[0].scope_spans[0].spans]
    steps = [s for s in spans if s.name == "step"]
    assert len(steps) == 2
    assert all(s.links[0].span_id.hex() == arrived().trace.span_id for s in steps)


@pytest.mark.parametrize("seconds", [-1, 3601, float("nan")])
def test_the_window_has_limits(seconds):
    with pytest.raises(InvalidRequest, match="between 0 and 3600"):
        StepWindow().open(seconds)


def test_opening_for_zero_seconds_closes_the_window():
    window = StepWindow(clock=lambda: 100)
    window.open(10)
    assert window.covers(101)
    window.open(0)
    assert not window.covers(101)


def test_boundaries_that_meet_give_spans_of_no_length(builder):
    bounds = boundaries(last_token_ns=START_NS + 16 * MS)
    spans = named(tree(builder, closed(boundaries=bounds)))
    assert spans["decode"].start_time == spans["decode"].end_time
