from __future__ import annotations

from tracing_factories import arrived, closed, core_started, step

from inferdbg.tracing import segments
from inferdbg.tracing.reader import open_run
from inferdbg.tracing.summary import summarize


def test_a_run_that_is_written_sealed_and_rolled_reads_as_a_growing_prefix(start, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 20_000)
    recording = start()
    recording.observer(core_started())
    seen = 0
    for burst in range(25):
        for n in range(20):
            number = burst * 20 + n
            recording.observer(arrived(f"r{number:04d}", seq_ids=(number,)))
            recording.observer(step(number, (number,)))
            recording.observer(closed(arrived(f"r{number:04d}", seq_ids=(number,))))
        run = open_run(recording.run_dir)
        ids = [i for batch in run.requests(["request_id"]) for i in batch.column(0).to_pylist()]
        assert ids == [f"r{n:04d}" for n in range(len(ids))]
        assert len(ids) >= seen
        assert run.warnings == []
        seen = len(ids)
    assert recording.flush()
    summary = summarize(open_run(recording.run_dir))
    assert summary.ends["finished"] == 500
    assert (summary.in_flight, summary.warnings) == (0, ())
    recording.close()
    assert len(list((recording.run_dir / "requests").glob("*.parquet"))) > 3
    assert not list(recording.run_dir.rglob("*.arrows"))
