from __future__ import annotations

import json
import os
import stat
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from tracing_factories import (
    MS,
    START_NS,
    Script,
    arrived,
    boundaries,
    choice,
    closed,
    core_started,
    rejected,
    scores,
    step,
    trace_context,
)

from inferdbg.engine.core.events import StepFailed
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.errors import UsageError
from inferdbg.engine.serving.events import Boundaries, EndKind, EngineLost
from inferdbg.tracing.bus import Gap
from inferdbg.tracing.housekeeping import Housekeeper
from inferdbg.tracing.losses import Losses
from inferdbg.tracing.reader import open_run, row_stages
from inferdbg.tracing.retention import Retention
from inferdbg.tracing.token_log import TokenLogMode


def observe(recording, *events):
    for event in events:
        recording.observer(event)
    assert recording.flush()


def rows(recording, table="requests"):
    run = open_run(recording.run_dir)
    found = [row for batch in getattr(run, table)() for row in batch.to_pylist()]
    assert run.warnings == []
    return found


def test_a_request_row_says_what_was_sampled_and_when(start):
    recording = start(model_fingerprint="abc")
    arrival = arrived(client_request_id="mine", replay_of="older", service_class="gold", tenant="t1")
    record = choice((20, 21, 2), stop_matched="2", cached_tokens=3, num_preemptions=1, requeue_ns=5 * MS)
    observe(recording, core_started(2), arrival, closed(arrival, choices=(record,)))
    (row,) = rows(recording)
    expected = {
        "request_id": "req-1", "prompt_index": 0, "choice_index": 0, "client_request_id": "mine",
        "replay_of": "older", "trace_id": arrival.trace.trace_id, "replica": "0", "incarnation": 2, "model": "tiny",
        "weight_version": "abc", "endpoint": "/v1/chat/completions", "service_class": "gold", "tenant": "t1",
        "arrival_ns": START_NS, "prompt_token_ids": [10, 11, 12, 13], "output_token_ids": [20, 21, 2],
        "output_logprobs": [-0.25, -0.5, -0.75], "top_ids": [20, 21, 21, 22, 2, 3],
        "token_offsets_ns": [16 * MS, 36 * MS, 56 * MS], "token_steps": [1, 2, 3], "finish_reason": "stop",
        "stop_matched": "2", "cached_tokens": 3, "num_preemptions": 1, "requeue_ns": 5 * MS, "end": "finished",
        "steps_complete": True, "error": None, "num_rows": 1, "drafted_tokens": None,
        "messages": None, "prompt_text": None, "output_text": None,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert row["sampling"]["seed"] == 7
    assert row["busy"]["detokenize_ns"] == 3 * MS
    assert row["request_stages"] == {
        "io_receive_ns": 1 * MS, "tokenize_ns": 2 * MS, "schedule_ns": 3 * MS, "prefill_ns": 10 * MS,
        "decode_ns": 40 * MS, "detokenize_ns": 1 * MS, "io_send_ns": 2 * MS,
    }  # fmt: skip


def test_stages_add_up_to_the_end_to_end_time_of_every_kind_of_end(start):
    recording = start()
    cut = boundaries(first_token_ns=None, last_token_ns=None, text_ready_ns=None, sent_ns=None)
    late = START_NS + 75 * MS
    events = [
        closed(arrived("a")),
        closed(arrived("b"), closed_ns=late),
        closed(arrived("c"), end=EndKind.ABORTED, boundaries=cut, closed_ns=START_NS + 30 * MS, choices=()),
        closed(
            arrived("d"), end=EndKind.FAILED, boundaries=Boundaries(received_ns=START_NS), closed_ns=late, choices=()
        ),
    ]
    observe(recording, *events)
    found = {row["request_id"]: row for row in rows(recording)}
    for name, total_ms in (("a", 59), ("b", 75), ("c", 30), ("d", 75)):
        stages = row_stages(found[name])
        assert stages[0].start_ns == START_NS
        assert all(one.end_ns == two.start_ns for one, two in pairwise(stages))
        assert sum(s.end_ns - s.start_ns for s in stages) == total_ms * MS
        assert sum(v for v in found[name]["request_stages"].values() if v is not None) == total_ms * MS
    assert found["c"]["request_stages"]["prefill_ns"] == 24 * MS
    assert found["c"]["request_stages"]["decode_ns"] is None


def test_each_choice_has_a_row_with_its_own_boundaries_and_the_requests(start):
    recording = start()
    arrival = arrived(prompts=((1, 2), (3, 4, 5)), sampling=SamplingParams(n=2, seed=1), seq_ids=(0, 1, 2, 3))
    early = boundaries(last_token_ns=START_NS + 30 * MS, text_ready_ns=START_NS + 31 * MS, sent_ns=START_NS + 32 * MS)
    choices = tuple(
        choice((9,), prompt_index=p, choice_index=c, seq_id=2 * p + c, boundaries=early if c else boundaries())
        for p in (0, 1)
        for c in (0, 1)
    )
    observe(recording, arrival, closed(arrival, choices=choices))
    found = rows(recording)
    assert [(r["prompt_index"], r["choice_index"], r["num_rows"]) for r in found] == [
        (0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)
    ]  # fmt: skip
    assert [r["prompt_token_ids"] for r in found] == [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]
    assert {r["request_boundaries"]["sent_ns"] for r in found} == {START_NS + 59 * MS}
    assert [sum(v for v in r["stages"].values()) for r in found] == [59 * MS, 32 * MS, 59 * MS, 32 * MS]


def test_a_rejected_request_has_a_row_and_one_that_ended_before_any_choice_has_its_prompt(start):
    recording = start()
    arrival = arrived("cut", prompts=((1, 2), (3,)), seq_ids=(0, 1))
    observe(recording, rejected(), arrival, closed(arrival, end=EndKind.ABORTED, choices=(), status=499))
    refused, *cut = rows(recording)
    assert (refused["end"], refused["error_type"], refused["status"]) == ("rejected", "queue_full", 429)
    assert refused["prompt_token_ids"] is None
    assert [(r["prompt_index"], r["prompt_token_ids"], r["output_token_ids"]) for r in cut] == [
        (0, [1, 2], None), (1, [3], None)
    ]  # fmt: skip


def test_arrivals_are_on_record_before_anything_else_happens(start):
    recording = start()
    parent = trace_context("req-1", parent_span_id="00000000000000aa", sampled=False)
    observe(recording, arrived(trace=parent, prompts=((1, 2), (3,)), seq_ids=(4, 5)))
    (row,) = rows(recording, "arrivals")
    assert row["prompts"] == [[1, 2], [3]]
    assert row["num_prompt_tokens"] == [2, 1]
    assert row["seq_ids"] == [4, 5]
    assert (row["parent_span_id"], row["trace_sampled"]) == ("00000000000000aa", False)


def test_steps_are_recorded_column_for_column(start):
    recording = start()
    record = step(
        3, (0, 1), prefill=5, admitted_seq_ids=(1,), admitted_cached=(16,), admitted_is_resume=(False,),
        preempted_seq_ids=(2,), preempted_lost=(40,), graph_bucket=4,
    )  # fmt: skip
    failure = StepFailed(step=4, time_ns=START_NS, stage="execute", error="RuntimeError: no memory", seq_ids=(0, 1))
    observe(recording, core_started(), record, failure)
    good, bad = rows(recording, "steps")
    for name in ("step", "start_ns", "execute_ns", "end_ns", "pages_free", "graph_bucket", "sampled_top_k"):
        assert good[name] == getattr(record, name)
    for name in (
        "chunk_seq_ids",
        "chunk_lens",
        "chunk_is_prefill",
        "sampled_ids",
        "sampled_logprobs",
        "preempted_lost",
    ):
        assert good[name] == list(getattr(record, name))
    assert good["waiting_reasons"] == ["slots"]
    assert (bad["failed_stage"], bad["error"], bad["failed_seq_ids"]) == ("execute", failure.error, [0, 1])
    assert bad["execute_ns"] is None


@pytest.mark.parametrize("log_text", [False, True])
def test_text_is_written_only_when_asked_for(start, log_text):
    recording = start(log_text=log_text)
    arrival = arrived(messages_json='[{"role":"user"}]', prompt_text="the prompt")
    observe(recording, arrival, closed(arrival))
    recording.close()
    (row,) = rows(recording)
    (first,) = rows(recording, "arrivals")
    texts = [row["messages"], row["prompt_text"], row["output_text"], first["messages"], first["prompt_text"]]
    wanted = ['[{"role":"user"}]', "the prompt", "a text", '[{"role":"user"}]', "the prompt"]
    assert texts == (wanted if log_text else [None] * 5)


@pytest.mark.parametrize("mode", [TokenLogMode.OFF, TokenLogMode.HASHED])
def test_without_plain_ids_no_id_stands_anywhere(start, mode):
    recording = start(token_log=mode, token_log_key=bytes(32))
    ids = (40961, 40962, 40963)
    sampling = SamplingParams(
        max_tokens=3, seed=1, stop=("secret stop",), stop_token_ids=(40964,), logit_bias={40965: 1.0},
        forced_token_ids=ids,
    )  # fmt: skip
    arrival = arrived(prompts=(ids,), sampling=sampling, seq_ids=(0,))
    record = choice(ids, top_ids=ids * 2, prompt_scores=replace(scores(), top_ids=ids * 2), stop_matched="40964")
    stepped = step(1, (0,), sampled_ids=ids[:1], sampled_top_ids=ids[:2])
    observe(recording, arrival, stepped, closed(arrival, choices=(record,)))
    recording.close()
    everything = json.dumps([rows(recording, table) for table in ("arrivals", "requests", "steps")])
    for secret in ("secret stop", *map(str, range(40961, 40966))):
        assert secret not in everything
    (row,) = rows(recording)
    assert (row["num_prompt_tokens"], row["num_output_tokens"]) == (3, 3)
    assert row["output_logprobs"] == [-0.25, -0.5, -0.75]
    if mode is TokenLogMode.HASHED:
        assert rows(recording, "steps")[0]["sampled_ids"] == row["output_token_ids"][:1]
    else:
        assert row["output_token_ids"] is None


def test_a_row_says_when_steps_were_dropped_while_it_was_in_flight(start):
    recording = start()
    before, during, after = arrived("before"), arrived("during"), arrived("after")
    observe(recording, before, closed(before), during, Gap(3), closed(during), after, closed(after))
    assert {r["request_id"]: r["steps_complete"] for r in rows(recording)} == {
        "before": True, "during": False, "after": True
    }  # fmt: skip


def test_what_arrow_cannot_hold_is_escaped_and_not_lost(start):
    recording = start()
    sampling = SamplingParams(max_tokens=10**30, seed=1)
    observe(recording, arrived("odd", client_request_id="\ud800 lone", sampling=sampling), arrived("plain"))
    odd, plain = rows(recording, "arrivals")
    assert odd["client_request_id"] == "\\ud800 lone"
    assert odd["sampling"]["max_tokens"] == 2**63 - 1
    assert plain["request_id"] == "plain"
    assert recording.dropped()["events"] == 0


def test_a_row_that_is_not_as_it_should_be_takes_no_other_with_it(start):
    recording = start()
    for name, ids in (("good", (0,)), ("bad", ("no number",)), ("better", (1,))):
        recording.observer(arrived(name, seq_ids=ids))
    recording.flush()
    assert [row["request_id"] for row in rows(recording, "arrivals")] == ["good", "better"]
    assert recording.dropped()["arrivals"] == 1


def test_a_new_core_gets_segments_and_a_file_of_its_own_and_the_lost_one_is_named(start):
    recording = start()
    lost = EngineLost(incarnation=1, time_ns=START_NS, reason="killed by signal 9", request_ids=("a",))
    first = arrived("a", seq_ids=(0,))
    observe(
        recording, core_started(1), first, step(1), lost, closed(first, end=EndKind.FAILED, error_type="engine_lost")
    )
    observe(recording, core_started(2), arrived("b", seq_ids=(0,)), step(1))
    recording.close()
    run = open_run(recording.run_dir)
    assert [(doc["incarnation"], (doc["lost"] or {}).get("reason")) for doc in run.replicas] == [
        (1, "killed by signal 9"), (2, None)
    ]  # fmt: skip
    assert run.replicas[0]["core"]["info"]["device"] == "cpu"
    assert [row["incarnation"] for row in rows(recording, "steps")] == [1, 2]
    assert [(f.request_id, f.outputs[0].steps) for f in run.in_flight()] == [("b", [1])]


def test_the_run_is_private_sealed_and_closed(start):
    recording = start()
    observe(recording, *Script().run())
    recording.close("interrupted")
    recording.close("again")
    run = open_run(recording.run_dir)
    assert stat.S_IMODE(os.stat(run.path).st_mode) == 0o700
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".parquet"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert run.manifest["ended"]["reason"] == "interrupted"


def test_a_directory_that_holds_a_run_is_refused(start):
    start().close()
    with pytest.raises(UsageError, match="already holds a run"):
        start()


def test_a_directory_that_holds_anything_is_refused_and_left_as_it_is(start, tmp_path):
    place = tmp_path / "mine"
    place.mkdir(mode=0o755)
    (place / "results.parquet").write_bytes(b"work of weeks")
    with pytest.raises(UsageError, match=r"mine is not empty; --run-dir takes a directory that is new or empty"):
        start(run_dir=place)
    with pytest.raises(UsageError, match=r"results\.parquet is a file"):
        start(run_dir=place / "results.parquet")
    assert [path.name for path in place.iterdir()] == ["results.parquet"]
    assert stat.S_IMODE(place.stat().st_mode) == 0o755


def test_an_empty_directory_is_taken_as_it_is(start, tmp_path):
    place = tmp_path / "mine"
    place.mkdir(mode=0o750)
    recording = start(run_dir=place)
    observe(recording, *Script(num_requests=1).run())
    recording.close()
    assert len(open_run(place).find_request("req-0000")) == 1
    assert stat.S_IMODE(place.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir() if path.is_dir()} == {0o700}


@pytest.mark.parametrize("name", ["", "eu/0", "../../x", "..", ".hidden", "a b", "ä", "x" * 65, "a\n"])
def test_a_replica_that_is_no_name_of_a_file_is_refused(start, tmp_path, name):
    with pytest.raises(UsageError, match="--replica must be"):
        start(replica=name)
    assert list(tmp_path.iterdir()) == []


def test_a_replica_with_dots_keeps_its_segments_apart(start):
    recording = start(replica="eu-1.b_2")
    observe(recording, *Script(num_requests=1).run())
    recording.close()
    assert [path.name for path in (recording.run_dir / "requests").iterdir()] == ["eu-1.b_2.1.000000.parquet"]
    assert rows(recording)[0]["replica"] == "eu-1.b_2"


@pytest.mark.parametrize("label", ["", "le", "quantile", "stage", "reason", "version", "__name__", "1st", "a-b", "a\n"])
def test_a_label_that_metrics_cannot_carry_is_refused(start, label):
    with pytest.raises(UsageError, match="--replica-label"):
        start(run_dir=None, replica_label=label)


@pytest.mark.parametrize("end", [EndKind.ABORTED, EndKind.FAILED])
def test_a_request_that_was_never_accepted_ends_as_it_did_in_the_stage_it_had_reached(start, end):
    recording = start()
    bounds = Boundaries(received_ns=START_NS, parsed_ns=START_NS + MS)
    observe(recording, rejected(end=end, boundaries=bounds, reason="x", closed_ns=START_NS + 5 * MS), rejected("plain"))
    cut, plain = rows(recording)
    assert (cut["end"], plain["end"]) == (end.value, "rejected")
    stages = {name: ns for name, ns in cut["request_stages"].items() if ns is not None}
    assert stages == {"io_receive_ns": MS, "tokenize_ns": 4 * MS}
    assert [stage.name for stage in row_stages(plain)] == ["io.receive"]


@pytest.mark.parametrize("mode", [TokenLogMode.OFF, TokenLogMode.HASHED])
def test_without_plain_ids_no_words_that_may_quote_a_client_are_written(start, mode):
    recording = start(token_log=mode, token_log_key=bytes(32))
    secret = "secret 40961"
    failed = [
        closed(arrived("engine"), end=EndKind.FAILED, status=500, error=secret, error_type="engine_error", choices=()),
        closed(arrived("streamed"), end=EndKind.REJECTED, error=secret, error_type="context_length", choices=()),
    ]
    lost = closed(arrived("lost"), end=EndKind.FAILED, error="killed by signal 9", error_type="engine_lost", choices=())
    refused = rejected("bad", status=400, reason="invalid_request", message=f"the template refuses: {secret}")
    step_failed = StepFailed(step=4, time_ns=START_NS, stage="execute", error=f"IndexError: {secret}", seq_ids=(0,))
    observe(recording, core_started(), refused, *failed, lost, step_failed)
    recording.close()
    assert {row["request_id"]: (row["error_type"], row["error"]) for row in rows(recording)} == {
        "bad": ("invalid_request", None), "engine": ("engine_error", None), "streamed": ("context_length", None),
        "lost": ("engine_lost", "killed by signal 9"),
    }  # fmt: skip
    assert rows(recording, "steps")[0]["error"] == "IndexError"
    files = [path for path in recording.run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if b"secret" in path.read_bytes()]


def test_what_anybody_can_send_is_written_at_a_bounded_rate_and_the_rest_counted(start):
    recording = start()
    flood = [
        rejected(f"r{n}", status=401, reason="invalid_api_key", closed_ns=START_NS + n * 10 * MS) for n in range(200)
    ]
    observe(recording, *flood, rejected("known", closed_ns=START_NS + 10 * MS))
    found = rows(recording)
    seconds = Counter(row["closed_ns"] // 10**9 for row in found if row["status"] == 401)
    assert set(seconds.values()) == {10}
    assert len(seconds) == 2
    assert found[-1]["request_id"] == "known"
    assert recording.dropped()["refusals"] == 180
    spans = [line for path in (recording.run_dir / "spans").iterdir() for line in path.read_text().splitlines()]
    assert sum(line.count('"text_completion"') for line in spans) >= 21
    assert sum(line.count("invalid_api_key") for line in spans) == 20
    body = recording.metrics_response()[0].decode()
    assert 'inferdbg_requests_rejected_total{reason="invalid_api_key",replica="0"} 200.0' in body


def test_an_unwritable_directory_stops_nothing_and_the_loss_is_shown(start, tmp_path, caplog):
    (tmp_path / "file").touch()
    recording = start(run_dir=tmp_path / "file" / "run")
    for event in Script(num_requests=3, num_tokens=4).run():
        recording.observer(event)
    recording.flush()
    recording.close()
    dropped = recording.dropped()
    assert (dropped["steps"], dropped["requests"], dropped["arrivals"]) == (4, 3, 3)
    assert dropped["spans"] > 0
    assert "serving goes on" in caplog.text
    body = recording.metrics_response()[0].decode()
    assert 'inferdbg_telemetry_dropped_total{replica="0",signal="requests"} 3.0' in body


def test_a_full_disk_loses_telemetry_says_so_and_leaves_a_readable_run(start, full_disk):
    recording = start()
    observe(recording, core_started())
    with full_disk(60_000):
        for burst in range(40):
            arrival = arrived(f"r{burst:03d}")
            observe(recording, arrival, *(step(burst * 10 + n) for n in range(10)), closed(arrival))
    recording.close()
    run = open_run(recording.run_dir)
    found = [row for batch in run.requests() for row in batch.to_pylist()]
    assert len(found) == 40  # kept in memory and written when there was room again
    steps = [n for batch in run.steps(["step"]) for n in batch.column(0).to_pylist()]
    assert len(steps) + run.dropped["steps"] == 400
    assert run.dropped["steps"] > 0
    incomplete = [row["request_id"] for row in found if not row["steps_complete"]]
    assert incomplete
    assert "r000" not in incomplete
    assert run.warnings == []


def test_metrics_alone_make_no_directory(start, tmp_path):
    recording = start(run_dir=None)
    observe(recording, *Script(num_requests=2).run())
    assert recording.run_dir is None
    assert list(tmp_path.iterdir()) == []
    assert b'inferdbg_requests_closed_total{end="finished",replica="0"} 2.0' in recording.metrics_response()[0]


def test_a_failing_disk_is_complained_of_once(tmp_path, caplog):
    def fails() -> None:
        raise OSError(28, "No space left on device")

    house = Housekeeper(tmp_path, "0", manifest=None, retention=Retention(), losses=Losses())  # no task of its own runs
    for _ in range(3):
        house._attempt(fails)
        house._attempt(lambda: None)  # another task that succeeds does not make it news again
    assert [r.getMessage() for r in caplog.records] == [
        f"the run in {tmp_path} cannot be kept (OSError: [Errno 28] No space left on device); "
        "serving goes on, losses are counted"
    ]


def test_spans_that_are_deleted_under_the_writer_are_lost_and_counted(start):
    recording = start()
    first, second = arrived("first"), arrived("second")
    observe(recording, core_started(1), first, closed(first))
    (path,) = (recording.run_dir / "spans").iterdir()
    held = sum(
        len(scope["spans"])
        for line in path.read_text().splitlines()
        for r in json.loads(line)["resourceSpans"]
        for scope in r["scopeSpans"]
    )
    path.unlink()
    assert recording.dropped()["spans"] == 0
    observe(recording, second, closed(second))
    assert recording.dropped()["spans"] == held > 0
    assert [p.name for p in (recording.run_dir / "spans").iterdir()] != []
