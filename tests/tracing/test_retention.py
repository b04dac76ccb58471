from __future__ import annotations

import os

import pytest
from tracing_factories import Script, arrived, closed, core_started

from inferdbg.engine.errors import UsageError
from inferdbg.tracing import segments
from inferdbg.tracing.reader import open_run
from inferdbg.tracing.retention import DEFAULT_RETENTION, Pin, Retention, apply_retention, parse_retention, pin

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
    assert (deleted.segments, deleted.bytes) == (3, 3000)
    assert left(run_dir) == [3, 4, 5, 6]


def test_what_is_too_old_goes(run_dir):
    assert apply_retention(run_dir, Retention(max_seconds=250), NOW).segments == 3
    assert left(run_dir) == [3, 4, 5, 6]


def test_a_live_segment_is_never_deleted(run_dir):
    apply_retention(run_dir, Retention(max_bytes=0), NOW)
    assert left(run_dir) == [6]


def test_pinned_stretches_are_kept(run_dir):
    pin(run_dir, Pin(NOW - 420, NOW - 390, "the incident"))
    with open(run_dir / "pins", "a") as file:
        file.write("not json\n")
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
    (document,) = run.replicas
    assert document["deleted"]["segments"] > 0
    kept = [i for batch in run.requests(["request_id"]) for i in batch.column(0).to_pylist()]
    assert kept == [f"r{n:03d}" for n in range(60 - len(kept), 60)]
    assert 0 < len(kept) < 60


def test_a_request_whose_end_was_deleted_is_not_taken_for_one_in_flight(start):
    recording = start()
    for event in Script(num_requests=2).run():
        recording.observer(event)
    recording.flush()
    requests = recording.run_dir / "requests"
    recording.close()
    (first,) = requests.iterdir()
    first.rename(requests / "0.1.000001.parquet")  # as if segment 0, with older ends, had been deleted
    arrivals = recording.run_dir / "arrivals"
    run = open_run(recording.run_dir)
    assert run.in_flight() == []
    assert len(list(arrivals.iterdir())) == 1
    assert core_started().incarnation == 1
