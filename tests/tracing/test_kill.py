from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from inferdbg.tracing.reader import RunStatus, open_run
from inferdbg.tracing.summary import summarize

CHILD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from factories import arrived, choice, closed, core_started, step
from inferdbg.tracing.recording_config import RecordingConfig
from inferdbg.tracing.session import start_recording

recording = start_recording(RecordingConfig(run_dir=Path(sys.argv[1])))
recording.observer(core_started(1))
recording.observer(arrived("never-ends", seq_ids=(0,)))
number = 0
while True:
    number += 1
    recording.observer(step(number, (0,), sampled_ids=(number,), sampled_top_ids=(number, 9)))
    arrival = arrived(f"req-{number}", seq_ids=(number,))
    recording.observer(arrival)
    recording.observer(closed(arrival, choices=(choice((number,), seq_id=number),)))
    print(number, time.monotonic_ns(), flush=True)
    time.sleep(0.004)
"""
PROMISE_NS = 100_000_000


def record_and_kill(run_dir: Path, seconds: float) -> tuple[int, int]:
    """Number of the last event acknowledged, and of the last one older than the promise, at the moment of the kill."""
    command = [sys.executable, "-c", CHILD, str(run_dir), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = [tuple(map(int, child.stdout.readline().split()))]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            acknowledged.append(tuple(map(int, child.stdout.readline().split())))
        killed_ns = time.monotonic_ns()
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read()
    acknowledged += [tuple(map(int, line.split())) for line in rest.splitlines() if len(line.split()) == 2]
    # A machine that stalls the child itself stalls its writing too: the longest stall near the end is allowed for.
    recent = [at_ns for _, at_ns in acknowledged if at_ns > killed_ns - 3 * PROMISE_NS]
    stall_ns = max((later - earlier for earlier, later in pairwise(recent)), default=0)
    old = [number for number, at_ns in acknowledged if at_ns < killed_ns - PROMISE_NS - stall_ns]
    return acknowledged[-1][0], old[-1]


@pytest.mark.parametrize("seconds", [0.4, 0.57, 0.71])
def test_kill_9_loses_nothing_older_than_the_promise(tmp_path, seconds):
    run_dir = tmp_path / "run"
    last, old = record_and_kill(run_dir, seconds)
    assert old > 10

    run = open_run(run_dir)
    assert run.status is RunStatus.LOST
    rows = [row for batch in run.requests(["request_id", "output_token_ids"]) for row in batch.to_pylist()]
    written = len(rows)
    assert [row["request_id"] for row in rows] == [f"req-{n}" for n in range(1, written + 1)]
    assert [row["output_token_ids"] for row in rows] == [[n] for n in range(1, written + 1)]
    assert old <= written <= last + 1

    flights = {flight.request_id: flight for flight in run.in_flight()}
    output = flights["never-ends"].outputs[0]
    assert output.token_ids == list(range(1, len(output.token_ids) + 1))
    assert len(output.token_ids) >= old
    assert output.steps == output.token_ids
    (row,) = run.find_request("never-ends")
    assert row["end"] is None
    assert row["output_token_ids"] == output.token_ids
    assert row["prompt_token_ids"] == [10, 11, 12, 13]

    summary = summarize(run)
    assert summary.ends["finished"] == written
    assert summary.in_flight == len(flights)
    assert summary.num_requests == written + len(flights)


def test_a_run_is_read_while_it_is_written(start):
    recording = start()
    run = open_run(recording.run_dir)
    assert run.status is RunStatus.OPEN
    assert list(run.requests()) == []
    recording.close()
    assert open_run(recording.run_dir).status is RunStatus.CLOSED
