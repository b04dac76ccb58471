from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from inferdbg.tracing.frames import END_MARK, FrameEncoder, StreamTail, open_stream, read_frames, read_stream

SCHEMA = pa.schema([("a", pa.int64()), ("l", pa.list_(pa.float32())), ("s", pa.string())])
BATCHES = [
    pa.RecordBatch.from_pylist(
        [{"a": i, "l": [0.5, float(i)], "s": "x" * i}, {"a": None, "l": None, "s": None}], SCHEMA
    )
    for i in range(3)
]
ENCODER = FrameEncoder(SCHEMA)
FRAMES = [ENCODER.frame(batch) for batch in BATCHES]
OPENING = ENCODER.opening()
CLOSED = OPENING + b"".join(FRAMES) + END_MARK


def read(path: Path, data: bytes) -> tuple[list[pa.RecordBatch], StreamTail]:
    path.write_bytes(data)
    tail = StreamTail()
    return list(read_frames(path, tail)), tail


def test_a_closed_stream_reads_back_and_any_arrow_reader_takes_it(tmp_path):
    batches, tail = read(tmp_path / "s", CLOSED)
    assert batches == BATCHES
    assert (tail.closed, tail.damage, tail.good_bytes) == (True, None, len(CLOSED))
    assert pa.ipc.open_stream(CLOSED).read_all().to_pylist() == pa.Table.from_batches(BATCHES).to_pylist()


def test_a_stream_cut_anywhere_gives_every_whole_batch(tmp_path):
    ends = [len(OPENING)]
    for frame in FRAMES:
        ends.append(ends[-1] + len(frame))
    borders = {end + off for end in ends for off in (-1, 0, 1, 4, 8)}
    for cut in sorted((borders & set(range(len(CLOSED)))) | set(range(0, len(CLOSED), 7))):
        batches, tail = read(tmp_path / "s", CLOSED[:cut])
        assert batches == BATCHES[: sum(end <= cut for end in ends[1:])]
        assert not tail.closed
        assert (tail.damage is None) == (cut in (0, *ends))


@pytest.mark.parametrize("phase", range(8))
def test_no_single_flipped_bit_goes_unnoticed(tmp_path, phase):
    for byte in range(phase, len(CLOSED), 24):
        altered = bytearray(CLOSED)
        altered[byte] ^= 1 << phase
        batches, tail = read(tmp_path / "s", bytes(altered))
        assert tail.damage is not None or not tail.closed
        assert batches == BATCHES[: len(batches)]


def test_a_tail_of_zeros_is_damage_and_not_an_end(tmp_path):
    batches, tail = read(tmp_path / "s", OPENING + FRAMES[0] + bytes(4096))
    assert batches == BATCHES[:1]
    assert tail.damage is not None


def test_bytes_after_the_end_mark_are_said(tmp_path):
    batches, tail = read(tmp_path / "s", CLOSED + FRAMES[0])
    assert batches == BATCHES
    assert tail.damage == f"{len(FRAMES[0])} bytes follow the end mark"


def test_a_stream_held_open_is_read_as_it_was_whatever_becomes_of_the_file(tmp_path):
    path = tmp_path / "s"
    begun = OPENING + FRAMES[0] + FRAMES[1][:-9]
    path.write_bytes(begun)
    stream = open_stream(path)
    with open(path, "ab") as file:  # the rest of the message comes, and all that follows
        file.write(CLOSED[len(begun) :])
    assert read(path, CLOSED)[0] == BATCHES
    path.unlink()
    for _ in range(2):
        tail = StreamTail()
        assert list(read_stream(stream, tail)) == BATCHES[:1]
        assert tail.damage.startswith("torn")
