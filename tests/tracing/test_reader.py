from __future__ import annotations

import json
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tracing_factories import MS, START_NS, Script, arrived, choice, closed, core_started, rejected, step

from inferdbg.engine.core.events import StepFailed
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.errors import RunError
from inferdbg.engine.serving.events import EndKind
from inferdbg.tracing import housekeeping, machine, reader
from inferdbg.tracing.reader import RunStatus, open_run
from inferdbg.tracing.schema import REQUESTS, conform
from inferdbg.tracing.summary import summarize


@pytest.fixture
def recorded(start):
    """A recording with four requests, flushed and still open."""
    recording = start()
    for event in Script(num_requests=4, num_tokens=5).run():
        recording.observer(event)
    assert recording.flush()
    return recording


def ids(run):
    return [i for batch in run.requests(["request_id"]) for i in batch.column(0).to_pylist()]


ALL = [f"req-{i:04d}" for i in range(4)]


def test_what_is_no_run_says_so(tmp_path):
    with pytest.raises(RunError, match="no such run"):
        open_run(tmp_path / "absent")
    with pytest.raises(RunError, match=r"it has no run\.json"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RunError, match="cannot be read"):
        open_run(tmp_path)


def rewrite(run_dir, **changes):
    path = run_dir / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_newer_major_schema_is_refused_and_a_newer_minor_is_read(recorded):
    recorded.close()
    rewrite(recorded.run_dir, schema="1.99")
    assert ids(open_run(recorded.run_dir)) == ALL
    rewrite(recorded.run_dir, schema="2.0")
    with pytest.raises(RunError, match="newer inferdbg"):
        open_run(recorded.run_dir)


def test_status_follows_the_writing_process(recorded, monkeypatch):
    process = machine.own_process()
    assert open_run(recorded.run_dir).status is RunStatus.OPEN
    rewrite(recorded.run_dir, process=process | {"start_ticks": process["start_ticks"] - 1})  # the pid was given again
    assert open_run(recorded.run_dir).status is RunStatus.LOST
    rewrite(recorded.run_dir, process=process | {"boot_id": "another machine"})
    assert open_run(recorded.run_dir).status is RunStatus.OPEN  # written a moment ago
    monkeypatch.setattr(reader, "_SILENT_SECONDS", -1.0)
    assert open_run(recorded.run_dir).status is RunStatus.LOST


def test_a_request_is_found_by_id_client_id_or_unique_prefix(recorded):
    run = open_run(recorded.run_dir)
    for key in ("req-0002", "client-2"):
        (row,) = run.find_request(key)
        assert row["request_id"] == "req-0002"
        assert row["output_token_ids"] == [201, 202, 203, 204, 205]
    with pytest.raises(RunError, match=r"fits 4 requests of .*: req-0000 \(client-0\), req-0001 \(client-1\), "):
        run.find_request("req-")
    with pytest.raises(RunError, match=r"fits 4 requests of .*, req-0003 \(client-3\)$"):
        run.find_request("client")
    for key in ("nothing", "", "\udcff"):
        with pytest.raises(RunError, match="has no request"):
            run.find_request(key)


def test_an_exact_id_wins_over_being_a_prefix(start):
    recording = start()
    for name in ("a", "ab"):
        recording.observer(closed(arrived(name)))
    recording.flush()
    assert open_run(recording.run_dir).find_request("a")[0]["request_id"] == "a"


def test_a_beginning_of_the_clients_id_is_enough_and_a_whole_one_wins_over_it(start):
    recording = start()
    for name, client in (("r1", "night"), ("r2", "night-watch"), ("n3", None), ("r4", "r")):
        recording.observer(closed(arrived(name, client_request_id=client)))
    recording.flush()
    run = open_run(recording.run_dir)
    for key, found in (("night", "r1"), ("night-w", "r2"), ("n3", "n3"), ("r", "r4")):
        assert run.find_request(key)[0]["request_id"] == found
    with pytest.raises(RunError, match=r"fits 3 requests of .*: n3, r1 \(night\), r2 \(night-watch\)$"):
        run.find_request("n")
    with pytest.raises(RunError, match=r"has no request 'x'; `inferdbg show .* --requests`"):
        run.find_request("x")


def test_rows_of_one_request_come_in_order_from_whatever_segments(start):
    recording = start()
    arrival = arrived("many", sampling=SamplingParams(n=3, seed=1), seq_ids=(0, 1, 2))
    choices = tuple(choice((c,), choice_index=c, seq_id=c) for c in (2, 0, 1))
    for event in (
        core_started(1),
        arrival,
        closed(arrival, choices=choices),
        core_started(2),
        closed(arrived("other")),
    ):
        recording.observer(event)
    recording.close()
    assert [row["choice_index"] for row in open_run(recording.run_dir).find_request("many")] == [0, 1, 2]


def test_parquet_is_preferred_over_a_stream_of_the_same_name(recorded):
    (stream,) = (recorded.run_dir / "requests").glob("*.arrows")
    copy = stream.read_bytes()
    recorded.close()
    stream.write_bytes(copy)  # as after a crash between the rename and the removal
    assert ids(open_run(recorded.run_dir)) == ALL


def test_a_torn_stream_is_read_up_to_the_tear_and_it_is_said(recorded):
    (stream,) = (recorded.run_dir / "requests").glob("*.arrows")
    copy = stream.read_bytes()
    recorded.observer(closed(arrived("later")))
    recorded.flush()
    longer = stream.read_bytes()
    recorded.close()
    next((recorded.run_dir / "requests").glob("*.parquet")).unlink()
    stream.write_bytes(longer[: len(copy) + 100])
    run = open_run(recorded.run_dir)
    assert ids(run) == ALL
    (warning,) = run.warnings
    assert warning.startswith("requests/0.1.000000.arrows: torn at byte")
    assert summarize(run).warnings == (warning,)


def test_a_torn_tail_of_a_live_run_is_a_write_under_way(recorded):
    (stream,) = (recorded.run_dir / "requests").glob("*.arrows")
    with open(stream, "ab") as file:
        file.write(b"\xff\xff\xff\xff\x10\x03")
    run = open_run(recorded.run_dir)
    assert ids(run) == ALL
    assert run.warnings == []


def test_no_flipped_bit_in_a_sealed_segment_goes_unnoticed(recorded):
    recorded.close()
    (sealed,) = (recorded.run_dir / "steps").glob("*.parquet")
    good = sealed.read_bytes()
    wanted = [batch.to_pylist() for batch in open_run(recorded.run_dir).steps()]
    assert len(wanted[0]) == 5
    salvaged = 0
    for byte in range(0, len(good), 151):
        altered = bytearray(good)
        altered[byte] ^= 1 << (byte % 8)
        sealed.write_bytes(altered)
        run = open_run(recorded.run_dir)
        salvaged += [batch.to_pylist() for batch in run.steps()] == wanted
        (warning,) = run.warnings
        assert warning.startswith("steps/0.1.000000.parquet")
    assert salvaged > 10


def test_a_segment_that_is_no_parquet_is_said_and_the_others_are_read(recorded):
    recorded.close()
    (recorded.run_dir / "requests" / "0.1.000001.parquet").write_bytes(b"PAR1 nothing of the kind")
    run = open_run(recorded.run_dir)
    assert ids(run) == ALL
    assert len(run.warnings) == 1


def test_unknown_columns_are_ignored_and_missing_ones_are_null(recorded):
    recorded.close()
    (sealed,) = (recorded.run_dir / "requests").glob("*.parquet")
    table = pq.read_table(sealed)
    older = table.drop_columns(["busy", "status"]).append_column("from_the_future", pa.array(["x"] * len(table)))
    pq.write_table(older, sealed)
    run = open_run(recorded.run_dir)
    batch = next(iter(run.requests()))
    assert batch.schema.equals(REQUESTS)
    assert batch.column("busy").null_count == batch.num_rows
    assert ids(run) == ALL
    assert run.warnings == []
    with pytest.raises(KeyError):
        list(run.requests(["from_the_future"]))


def test_structs_grow_and_shrink_like_tables():
    old = pa.schema([("busy", pa.struct([("send_ns", pa.int32()), ("gone", pa.int64())]))])
    batch = pa.RecordBatch.from_pylist([{"busy": {"send_ns": 3, "gone": 1}}, {"busy": None}], old)
    wanted = pa.schema([REQUESTS.field("busy")])
    assert conform(batch, wanted).to_pylist() == [
        {"busy": {"tokenize_wait_ns": None, "tokenize_ns": None, "detokenize_ns": None, "send_ns": 3}},
        {"busy": None},
    ]


def test_requests_in_flight_have_what_their_sequences_sampled(start):
    recording = start()
    sampling = SamplingParams(n=2, seed=1)
    arrival = arrived("open", prompts=((1, 2), (3,)), sampling=sampling, seq_ids=(10, 11, 12, 13))
    events = [
        core_started(1), arrival, closed(arrived("done", seq_ids=(1,))),
        step(1, (10, 12), admitted_seq_ids=(10,), admitted_cached=(16,), admitted_is_resume=(False,)),
        step(2, (12, 1), preempted_seq_ids=(10,), preempted_lost=(3,)),
        step(3, (10,), admitted_seq_ids=(10,), admitted_cached=(32,), admitted_is_resume=(True,),
             finished_seq_ids=(12,), finished_reasons=("length",)),
    ]  # fmt: skip
    for event in events:
        recording.observer(event)
    recording.flush()
    (flight,) = open_run(recording.run_dir).in_flight()
    places = [(o.seq_id, o.prompt_index, o.choice_index, o.token_ids, o.has_ended) for o in flight.outputs]
    assert places == [
        (10, 0, 0, [1001, 1003], False), (11, 0, 1, [], False), (12, 1, 0, [1201, 1202], True), (13, 1, 1, [], False)
    ]  # fmt: skip
    first = flight.outputs[0]
    assert (first.cached_tokens, first.num_preemptions, first.steps) == (16, 1, [1, 3])
    assert first.sampled_ns == [step(1).sampled_ns, step(3).sampled_ns]
    assert flight.rows()[2]["prompt_token_ids"] == [3]


def test_rows_in_flight_have_the_columns_of_the_token_log(start):
    recording = start()
    done = arrived("done", seq_ids=(1,))
    for event in (core_started(1), arrived("open"), arrived("bare", seq_ids=()), done, closed(done), step(1, (0,))):
        recording.observer(event)
    recording.flush()
    run = open_run(recording.run_dir)
    (row,) = run.find_request("open")
    for name in ("open", "bare", "done"):
        assert list(run.find_request(name)[0]) == REQUESTS.names
    assert (row["end"], row["status"], row["error"], row["busy"], row["finish_reason"]) == (None,) * 5
    assert (row["seq_id"], row["num_prompt_tokens"], row["output_token_ids"]) == (0, 4, [1])


def admits(*seq_ids):
    number = len(seq_ids)
    return {"admitted_seq_ids": seq_ids, "admitted_cached": (0,) * number, "admitted_is_resume": (False,) * number}


def test_a_hole_in_the_steps_is_told_of_those_in_flight_that_it_may_concern(start):
    recording = start()
    late_ns = step(5).start_ns + MS
    events = [
        core_started(1), arrived("unlucky", seq_ids=(0,)), arrived("ended", seq_ids=(1,)),
        step(1, (0, 1), **admits(0, 1)),
        step(2, (0, 1), finished_seq_ids=(1,), finished_reasons=("stop",)),
        step(5, (0,)),
        arrived("later", seq_ids=(2,), time_ns=late_ns), step(6, (0, 2), **admits(2)), step(7, (0, 2)),
        arrived("unadmitted", seq_ids=(3,), time_ns=late_ns), step(8, (3,)),
    ]  # fmt: skip
    for event in events:
        recording.observer(event)
    recording.flush()
    run = open_run(recording.run_dir)
    assert {flight.request_id: flight.rows()[0]["steps_complete"] for flight in run.in_flight()} == {
        "unlucky": False, "ended": True, "later": True, "unadmitted": False
    }  # fmt: skip
    (row,) = run.find_request("unlucky")
    assert (row["output_token_ids"], row["num_output_tokens"]) == ([1, 2, 5, 6, 7], None)


def test_a_failed_step_is_no_hole(start):
    recording = start()
    failed = StepFailed(step=2, time_ns=step(2).start_ns, stage="execute", error="x", seq_ids=(9,))
    for event in (core_started(1), arrived("open"), step(1, (0,), **admits(0)), failed, step(3, (0,))):
        recording.observer(event)
    recording.flush()
    assert open_run(recording.run_dir).find_request("open")[0]["steps_complete"] is True


@pytest.mark.parametrize("seals", [False, True])
def test_a_request_that_closes_between_two_passes_counts_once(start, seals):
    recording = start()
    recording.observer(core_started(1))
    recording.observer(arrived("first"))
    recording.observer(arrived("second", seq_ids=(1,)))
    recording.observer(closed(arrived("first")))
    recording.flush()
    run = open_run(recording.run_dir)
    assert ids(run) == ["first"]
    recording.observer(step(1, (1,), **admits(1)))
    recording.observer(closed(arrived("second", seq_ids=(1,))))
    recording.observer(arrived("third", seq_ids=(2,)))
    recording.flush()
    if seals:
        recording.close()
        assert not list(recording.run_dir.rglob("*.arrows"))
    assert ids(run) == ["first"]
    assert [flight.request_id for flight in run.in_flight()] == ["second"]
    assert (summarize(run).num_requests, summarize(run).in_flight) == (2, 1)
    assert run.find_request("second")[0]["end"] is None
    again = summarize(open_run(recording.run_dir))
    assert (again.ends["finished"], again.in_flight) == (2, 1)
    assert run.warnings == []


def test_a_request_in_flight_whose_sequences_are_not_known_has_its_prompts(start):
    recording = start()
    recording.observer(arrived("odd", prompts=((1, 2), (3,)), seq_ids=()))
    recording.flush()
    rows = open_run(recording.run_dir).find_request("odd")
    assert [(r["prompt_index"], r["prompt_token_ids"], r["num_output_tokens"], r["num_rows"]) for r in rows] == [
        (0, [1, 2], 0, 2),
        (1, [3], 0, 2),
    ]


def test_an_idle_run_shows_that_its_writer_lives(start, monkeypatch):
    monkeypatch.setattr(housekeeping, "_TOUCH_SECONDS", 0.0)
    recording = start()
    manifest = recording.run_dir / "run.json"
    os.utime(manifest, (1, 1))
    recording.observer(core_started(1))  # wakes the housekeeper
    recording.flush()
    deadline = time.monotonic() + 5
    while manifest.stat().st_mtime < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.time() - manifest.stat().st_mtime < 30


def test_the_tokenizer_of_a_run_cannot_lie_outside_of_it(recorded, tmp_path):
    recorded.close()
    (tmp_path / "elsewhere").mkdir()
    rewrite(recorded.run_dir, tokenizer={"path": "../elsewhere"})
    assert open_run(recorded.run_dir).tokenizer_dir is None


def test_a_summary_counts_requests_once_and_tokens_where_they_are(start):
    recording = start()
    many = arrived("many", prompts=((1, 2, 3),), sampling=SamplingParams(n=2, seed=1), seq_ids=(0, 1))
    events = [
        core_started(1), many,
        closed(many, choices=(choice((1, 2), cached_tokens=2), choice((3, 4, 5), choice_index=1, seq_id=1))),
        rejected(), arrived("waiting", seq_ids=(2,)),
    ]  # fmt: skip
    for event in events:
        recording.observer(event)
    recording.flush()
    document = summarize(open_run(recording.run_dir)).to_json()
    assert document["schema"] == "inferdbg.show/1"
    assert document["num_requests"] == 3
    assert document["ends"] == {"finished": 1, "aborted": 0, "rejected": 1, "failed": 0}
    assert document["in_flight"] == 1
    assert document["tokens"] == {"prompt": 3, "output": 5, "cached": 2}
    assert document["e2e_sum_seconds"] == pytest.approx(0.059)
    assert sum(document["stages_seconds"].values()) == pytest.approx(document["e2e_sum_seconds"], abs=1e-12)
    assert document["ttft_seconds"] == {"p50": 0.016, "p95": 0.016, "p99": 0.016}
    assert document["itl_seconds"]["p50"] == pytest.approx(0.020)  # gaps of 40, 20 and 20 ms
    assert document["in_flight_requests"] == [
        {"request_id": "waiting", "client_request_id": None, "prompt_tokens": 4, "output_tokens": 0}
    ]
    json.dumps(document)


def test_sums_are_over_accepted_requests_however_the_others_ended(start):
    recording = start()
    for event in (closed(arrived("a")), rejected("b", end=EndKind.ABORTED), rejected("c", end=EndKind.FAILED)):
        recording.observer(event)
    recording.flush()
    summary = summarize(open_run(recording.run_dir))
    assert summary.ends == {"finished": 1, "aborted": 1, "rejected": 0, "failed": 1}
    assert summary.e2e_sum_seconds == pytest.approx(0.059)
    assert summary.deleted == {"segments": 0, "bytes": 0, "tables": {}}


def test_an_empty_run_has_a_summary(start):
    recording = start()
    recording.close()
    document = summarize(open_run(recording.run_dir)).to_json()
    assert document["num_requests"] == 0
    assert document["itl_seconds"] == {"p50": None, "p95": None, "p99": None}
    assert document["e2e_sum_seconds"] == 0


def test_percentiles_over_many_requests_are_numpys(start):
    recording = start()
    for n in range(101):
        arrival = arrived(f"r{n}")
        base = choice((1, 2), token_times_ns=(START_NS + n * MS, START_NS + 3 * n * MS))
        recording.observer(closed(arrival, choices=(base,)))
    recording.flush()
    summary = summarize(open_run(recording.run_dir))
    assert summary.itl_seconds == pytest.approx({"p50": 0.1, "p95": 0.19, "p99": 0.198})


def test_a_closed_run_without_its_rows_says_so(start):
    recording = start()
    done = arrived("done", seq_ids=(1,))
    for event in (core_started(1), done, closed(done)):
        recording.observer(event)
    recording.close("stopped")
    assert summarize(open_run(recording.run_dir)).warnings == ()
    for segment in (recording.run_dir / "requests").iterdir():
        segment.unlink()
    (warning,) = summarize(open_run(recording.run_dir)).warnings
    assert "1 requests that arrived have no row" in warning


@pytest.mark.parametrize("text", ["[" * 200_000, '{"core": 5}', '{"dropped": [1]}', '{"incarnation": [0]}'])
def test_a_corrupt_replica_file_is_a_warning(start, text):
    recording = start()
    recording.observer(core_started(1))
    recording.close("stopped")
    (file,) = (recording.run_dir / "replicas").iterdir()
    file.write_text(text)
    run = open_run(recording.run_dir)
    assert run.replicas == []
    assert any(file.name in warning for warning in run.warnings)


def test_a_manifest_of_other_shapes_is_no_run(start):
    recording = start()
    recording.close("stopped")
    file = recording.run_dir / "run.json"
    sound = json.loads(file.read_text())
    for name in ("ended", "process", "model", "config", "logged"):
        file.write_text(json.dumps(sound | {name: "x"}))
        with pytest.raises(RunError, match=f"{name} is no object"):
            open_run(recording.run_dir)
    file.write_text("[" * 200_000)
    with pytest.raises(RunError, match="nested too deeply"):
        open_run(recording.run_dir)
