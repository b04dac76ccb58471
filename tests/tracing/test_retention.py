from __future__ import annotations

import json
import os

import pytest
from tracing_factories import MS, START_NS, arrived, closed, core_started

from inferdbg.engine.errors import UsageError
from inferdbg.tracing import segments
from inferdbg.tracing.reader import open_run
from inferdbg.tracing.retention import DEFAULT_RETENTION, Retention, apply_retention, parse_retention
from inferdbg.tracing.run_files import TABLE_NAMES
from inferdbg.tracing.schema import TABLES
from inferdbg.tracing.summary import summarize

NOW = 1_796_000_000.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("24h", Retention(86400.0)),
        ("10GB", Retention(None, 10 * 10**9)),
        ("7d, 500MB", Retention(7 * 86400.0, 500 * 10**6)),
        ("off", Retention()),
        ("90s", Retention(90.0)),
        ("1.5GB", Retention(None, 1_500_000_000)),
    ],
)
def test_limits_are_read(text, wanted):
    assert parse_retention(text) == wanted
    assert parse_retention(str(wanted)) == wanted


@pytest.mark.parametrize("text", ["10GB", "500MB", "1TB", "off"])
def test_a_limit_is_said_as_it_was_given(text):
    assert str(parse_retention(text)) == text


@pytest.mark.parametrize("text", ["", "10", "0h", "-1h", "10XB", "1h,2h", "1GB,2GB", "forever"])
def test_other_limits_are_refused(text):
    with pytest.raises(UsageError, match="--retain"):
        parse_retention(text)


def test_a_limit_is_on_by_default_and_reads_back_as_it_prints():
    assert DEFAULT_RETENTION.max_bytes == 10 * 10**9
    for retention in (DEFAULT_RETENTION, Retention(), Retention(60.0, 10**6)):
        assert parse_retention(str(retention)) == retention


@pytest.fixture
def run_dir(tmp_path):
    """Six sealed segments of 1000 bytes in two tables, one every 100 s, the newest 0 s old; and a live stream."""
    for index in range(6):
        path = tmp_path / ("steps" if index % 2 else "requests") / f"0.0.{index:06d}.parquet"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (NOW - 500 + index * 100,) * 2)
    live = tmp_path / "steps" / "0.0.000006.arrows"
    live.write_bytes(bytes(1000))
    os.utime(live, (NOW - 9000,) * 2)
    return tmp_path


def left(run_dir):
    return sorted(int(path.name.split(".")[2]) for path in run_dir.rglob("0.*"))


def test_the_oldest_go_first_until_it_fits(run_dir):
    deleted = apply_retention(run_dir, Retention(max_bytes=4500), NOW)
    assert [(segment.table, segment.size) for segment in deleted] == [
        ("requests", 1000), ("steps", 1000), ("requests", 1000)
    ]  # fmt: skip
    assert left(run_dir) == [3, 4, 5, 6]


def test_what_is_too_old_goes(run_dir):
    assert len(apply_retention(run_dir, Retention(max_seconds=250), NOW)) == 3
    assert left(run_dir) == [3, 4, 5, 6]


def test_a_live_segment_is_never_deleted(run_dir):
    apply_retention(run_dir, Retention(max_bytes=0), NOW)
    assert left(run_dir) == [6]


def test_pinned_stretches_are_kept(run_dir):
    line = json.dumps({"start": NOW - 420, "end": NOW - 390, "why": "the incident"})
    (run_dir / "pins").write_text(f"{line}\nnot json\n")
    apply_retention(run_dir, Retention(max_bytes=0), NOW)
    # segments end 100 s apart in each table every 200 s: [.., -500] (-500, -300] and [.., -400] (-400, -200]
    assert left(run_dir) == [1, 2, 3, 6]


def test_of_the_spans_the_file_being_written_stays(tmp_path):
    (tmp_path / "spans").mkdir()
    for index in range(3):
        path = tmp_path / "spans" / f"0.0.{index:06d}.jsonl"
        path.write_bytes(bytes(10))
        os.utime(path, (NOW + index,) * 2)
    apply_retention(tmp_path, Retention(max_bytes=0), NOW)
    assert left(tmp_path) == [2]


def test_a_recording_bounds_itself_and_says_what_it_deleted(start, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 5000)
    recording = start(retention=Retention(max_bytes=150_000))
    for n in range(60):
        recording.observer(closed(arrived(f"r{n:03d}")))
        if n % 3 == 0:
            recording.flush()
    recording.close()
    run = open_run(recording.run_dir)
    kept = [i for batch in run.requests(["request_id"]) for i in batch.column(0).to_pylist()]
    assert kept == [f"r{n:03d}" for n in range(60 - len(kept), 60)]
    assert 0 < len(kept) < 60
    deleted = run.deleted
    assert deleted["tables"]["requests"]["rows"] == 60 - len(kept)
    assert deleted["segments"] == sum(table["segments"] for table in deleted["tables"].values())
    assert deleted["bytes"] > 0
    assert summarize(run).to_json()["deleted"] == deleted


def test_what_is_deleted_is_announced_before_it_goes(run_dir):
    seen = []
    apply_retention(run_dir, Retention(max_bytes=6500), NOW, announce=lambda s: seen.extend(x.path.exists() for x in s))
    assert seen == [True]


def test_nothing_but_the_runs_own_segments_is_looked_at(tmp_path):
    others = [
        "results.parquet", "steps/notes.parquet", "steps/my.data.parquet", "requests/0.0.000000.csv",
        "spans/mine.jsonl",
        "2025-01-01-serve/steps/0.0.000000.parquet", "2025-01-01-serve/spans/0.0.000000.jsonl",
        "tokenizer/0.0.000000.parquet",
    ]  # fmt: skip
    for name in (*others, "steps/0.0.000000.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1000))
    (tmp_path / "steps" / "0.0.000001.parquet").symlink_to(tmp_path / "results.parquet")
    deleted = apply_retention(tmp_path, Retention(max_bytes=0), NOW)
    assert [segment.path for segment in deleted] == [tmp_path / "steps" / "0.0.000000.parquet"]
    assert all((tmp_path / name).exists() for name in others)
    assert (tmp_path / "steps" / "0.0.000001.parquet").is_symlink()


def test_the_names_of_the_tables_are_those_of_the_schema():
    assert tuple(TABLES) == TABLE_NAMES


def record_two_cores(start, late_ns, **changes):
    """`old` ends and `lingering` goes on under core 1, then `new` ends and `open` goes on under core 2."""
    recording = start(**changes)
    old, lingering = arrived("old"), arrived("lingering", seq_ids=(1,))
    new = arrived("new", time_ns=late_ns, seq_ids=(2,))
    later = arrived("open", time_ns=late_ns + 100 * MS, seq_ids=(3,))
    for event in (core_started(1), old, lingering, closed(old), core_started(2), new, closed(new), later):
        recording.observer(event)
    recording.close()
    return recording.run_dir


def test_a_request_whose_end_was_deleted_is_not_taken_for_one_in_flight(start):
    late_ns = START_NS + 10**9
    run_dir = record_two_cores(start, late_ns)
    assert [flight.request_id for flight in open_run(run_dir).in_flight()] == ["lingering", "open"]
    (run_dir / "requests" / "0.1.000000.parquet").unlink()
    document = run_dir / "replicas" / "0.2.json"
    deleted = {"segments": 1, "bytes": 9, "tables": {"requests": {"segments": 1, "rows": 1}}}
    document.write_text(json.dumps(json.loads(document.read_text()) | {"deleted": deleted}))
    run = open_run(run_dir)
    assert run.deleted == deleted
    # `old` and `lingering` cannot be told apart any more
    assert [flight.request_id for flight in run.in_flight()] == ["open"]


def test_what_is_missing_without_retention_hides_no_request_in_flight(start):
    run_dir = record_two_cores(start, START_NS + 10**9)
    requests = run_dir / "requests"
    (requests / "0.1.000000.parquet").rename(requests / "0.1.000001.parquet")  # the first could not be opened
    assert [flight.request_id for flight in open_run(run_dir).in_flight()] == ["lingering", "open"]


def test_deletions_of_other_tables_hide_no_request_in_flight(start):
    run_dir = record_two_cores(start, START_NS + 10**9)
    document = run_dir / "replicas" / "0.2.json"
    deleted = {"segments": 1, "bytes": 9, "tables": {"steps": {"segments": 1, "rows": 70}}}
    document.write_text(json.dumps(json.loads(document.read_text()) | {"deleted": deleted}))
    assert [flight.request_id for flight in open_run(run_dir).in_flight()] == ["lingering", "open"]
