"""Every released schema stays readable: one small run of each is committed, and is never written again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferdbg.tracing.reader import open_run
from inferdbg.tracing.schema import SCHEMA_VERSION
from inferdbg.tracing.summary import summarize

GOLDEN = Path(__file__).with_name("golden")
RUNS = sorted(path for path in GOLDEN.iterdir() if (path / "run.json").is_file())


def test_there_is_a_golden_run_of_the_current_schema():
    assert SCHEMA_VERSION in [path.name for path in RUNS]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_golden_run_reads_as_it_was_recorded(path):
    run = open_run(path)
    summary = summarize(run)
    assert summary.ends == {"finished": 2, "aborted": 0, "rejected": 1, "failed": 1}
    assert summary.tokens == {"prompt": 16, "output": 8, "cached": 4}
    assert summary.e2e_sum_seconds == pytest.approx(3 * 0.059)
    assert summary.e2e_seconds == pytest.approx({"p50": 0.059, "p95": 0.059, "p99": 0.059})
    assert run.warnings == []

    (flight,) = summary.in_flight_requests
    assert flight.arrival["client_request_id"] == "client-open"
    assert flight.outputs[0].token_ids == [1, 2, 3]

    (row,) = run.find_request("client-1")
    assert row["prompt_token_ids"] == [1, 2, 3, 4, 5, 6]
    assert row["output_token_ids"] == [101, 102, 103, 104]
    assert row["output_logprobs"] == [-0.25, -0.5, -0.75, -1.0]
    assert row["sampling"]["seed"] == 7
    assert row["output_text"] == "a text"
    cores = [(step["incarnation"], step["step"]) for batch in run.steps() for step in batch.to_pylist()]
    assert {(1, number) for number in row["token_steps"]} <= set(cores)
    assert [doc["incarnation"] for doc in run.replicas] == [1, 2]
    assert run.clock.wall_ns == 1_796_000_000_000_000_000

    lines = [json.loads(line) for file in sorted((path / "spans").iterdir()) for line in file.read_text().splitlines()]
    spans = [span for line in lines for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    assert sum("parentSpanId" not in span for span in spans) == 4
