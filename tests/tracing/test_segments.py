from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inferdbg.tracing import segments
from inferdbg.tracing.frames import END_MARK, StreamTail, read_frames
from inferdbg.tracing.seal import seal_stream
from inferdbg.tracing.segments import TableWriter

SCHEMA = pa.schema(
    [("n", pa.int64()), ("token_offsets_ns", pa.list_(pa.int64())), ("output_logprobs", pa.list_(pa.float32()))]
)


def batch(*numbers: int) -> pa.RecordBatch:
    rows = [{"n": n, "token_offsets_ns": [n, n + 1], "output_logprobs": [-0.5, -float(n)]} for n in numbers]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


@pytest.fixture
def closed():
    return []


@pytest.fixture
def writer(tmp_path, closed):
    return TableWriter(tmp_path / "steps", SCHEMA, "0", keep_bytes=1 << 20, on_closed=closed.append)


def numbers(path):
    return [n for b in read_frames(path, StreamTail()) for n in b.column("n").to_pylist()]


def test_rows_are_readable_before_the_segment_is_closed(writer, tmp_path):
    assert writer.write(batch(1, 2)) == 0
    (stream,) = (tmp_path / "steps").iterdir()
    assert stream.name == "0.0.000000.arrows"
    assert numbers(stream) == [1, 2]


def test_a_full_segment_is_handed_over_and_the_next_one_is_begun(writer, tmp_path, closed, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 2000)
    for n in range(8):
        writer.write(batch(n))
    assert [path.name for path in closed[:2]] == ["0.0.000000.arrows", "0.0.000001.arrows"]
    assert closed[0].read_bytes().endswith(END_MARK)
    writer.close()
    assert [n for path in closed for n in numbers(path)] == list(range(8))


def test_a_new_incarnation_begins_segments_of_its_own(writer, closed):
    writer.write(batch(1))
    writer.set_incarnation(2)
    writer.write(batch(2))
    writer.close()
    assert [path.name for path in closed] == ["0.0.000000.arrows", "0.2.000000.arrows"]


def test_a_writer_never_takes_a_name_that_is_taken(writer, tmp_path, closed):
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "0.0.000000.parquet").touch()
    (tmp_path / "steps" / "0.0.000001.arrows").touch()
    writer.write(batch(1))
    writer.close()
    assert [path.name for path in closed] == ["0.0.000002.arrows"]


def test_rows_wait_for_a_disk_that_fails_and_are_written_when_it_is_back(tmp_path, closed, monkeypatch):
    monkeypatch.setattr(segments, "_RETRY_SECONDS", 0.0)
    blocker = tmp_path / "run"
    blocker.write_text("a file where the directory should be")
    writer = TableWriter(blocker / "requests", SCHEMA, "0", keep_bytes=1 << 20, on_closed=closed.append)
    assert writer.write(batch(1)) == 0
    assert writer.write(batch(2)) == 0
    blocker.unlink()
    assert writer.write(batch(3)) == 0
    assert writer.close() == 0
    assert numbers(closed[0]) == [1, 2, 3]


def test_an_opening_that_fails_uses_up_no_number(tmp_path, closed, full_disk, monkeypatch):
    monkeypatch.setattr(segments, "_RETRY_SECONDS", 0.0)
    writer = TableWriter(tmp_path / "requests", SCHEMA, "0", keep_bytes=1 << 20, on_closed=closed.append)
    with full_disk(100):
        assert writer.write(batch(1)) == 0
    assert list((tmp_path / "requests").iterdir()) == []
    assert writer.write(batch(2)) == 0
    writer.close()
    assert [path.name for path in closed] == ["0.0.000000.arrows"]
    assert numbers(closed[0]) == [1, 2]


def test_what_cannot_wait_is_lost_and_counted(tmp_path, closed):
    blocker = tmp_path / "run"
    blocker.touch()
    writer = TableWriter(blocker / "steps", SCHEMA, "0", keep_bytes=0, on_closed=closed.append)
    assert writer.write(batch(1, 2)) == 2
    keeping = TableWriter(blocker / "requests", SCHEMA, "0", keep_bytes=1 << 20, on_closed=closed.append)
    assert keeping.write(batch(1, 2, 3)) == 0
    assert keeping.close() == 3
    assert closed == []


def test_a_write_that_fails_half_way_leaves_whole_messages(tmp_path, closed, full_disk):
    writer = TableWriter(tmp_path / "steps", SCHEMA, "0", keep_bytes=0, on_closed=closed.append)
    lost = 0
    with full_disk(3000):
        for n in range(20):
            lost += writer.write(batch(n))
    writer.close()
    tail = StreamTail()
    kept = [n for b in read_frames(closed[0], tail) for n in b.column("n").to_pylist()]
    assert tail.damage is None
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 20
    assert lost == 20 - len(kept)


def test_sealing_keeps_every_row_and_removes_the_stream(writer, closed):
    for n in range(5):
        writer.write(batch(n))
    writer.close()
    stamp = closed[0].stat().st_mtime_ns
    sealed = seal_stream(closed[0])
    assert sealed is not None
    assert not closed[0].exists()
    assert sealed.stat().st_mtime_ns == stamp
    assert pq.read_table(sealed, page_checksum_verification=True).column("n").to_pylist() == [0, 1, 2, 3, 4]
    chunk = pq.ParquetFile(sealed).metadata.row_group(0)
    encodings = {chunk.column(i).path_in_schema: chunk.column(i).encodings for i in range(chunk.num_columns)}
    assert "DELTA_BINARY_PACKED" in encodings["token_offsets_ns.list.element"]
    assert "BYTE_STREAM_SPLIT" in encodings["output_logprobs.list.element"]
    assert chunk.column(0).compression == "ZSTD"


def test_a_damaged_stream_is_not_sealed(writer, closed):
    for n in range(3):
        writer.write(batch(n))
    writer.close()
    data = bytearray(closed[0].read_bytes())
    data[-200] ^= 4
    closed[0].write_bytes(data)
    assert seal_stream(closed[0]) is None
    assert [path.name for path in closed[0].parent.iterdir()] == [closed[0].name]


def test_a_disk_that_fills_up_while_sealing_leaves_the_stream_and_nothing_else(writer, closed, full_disk):
    for n in range(50):
        writer.write(batch(*range(n, n + 20)))
    writer.close()
    with full_disk(200), pytest.raises(OSError, match="File too large"):
        seal_stream(closed[0])
    assert [path.name for path in closed[0].parent.iterdir()] == [closed[0].name]
    assert seal_stream(closed[0]) is not None


def test_a_segment_that_is_deleted_under_the_writer_is_lost_and_counted(writer, tmp_path, caplog):
    assert writer.write(batch(1, 2, 3)) == 0
    (tmp_path / "steps").rename(tmp_path / "elsewhere")
    assert writer.write(batch(4)) == 3
    assert "deleted or moved away; what it held (3) is lost" in caplog.text
    assert writer.write(batch(5)) == 0
    (stream,) = (tmp_path / "steps").iterdir()
    assert numbers(stream) == [4, 5]
    stream.unlink()
    assert writer.close() == 2
