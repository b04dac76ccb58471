from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.machine import describe_machine, git_commit, own_process, start_ticks, versions
from inferdbg.tracing.manifest import CORE_FIELDS, FRONT_FIELDS, ReplicaFile
from inferdbg.tracing.reader import open_run
from inferdbg.tracing.token_log import TokenLogMode

NOT_RECORDED = {"api_key", "admin_key", "model_dir", "keep_text"}  # the last two: it is the core's; logged.text says it


def test_every_setting_is_either_recorded_or_known_not_to_be():
    assert {f.name for f in fields(CoreConfig)} - set(CORE_FIELDS) <= NOT_RECORDED
    assert {f.name for f in fields(FrontConfig)} - set(FRONT_FIELDS) <= NOT_RECORDED


def test_the_manifest_says_how_and_where_and_holds_no_secret(start, tmp_path):
    core = CoreConfig(model_dir=tmp_path, page_size=32)
    front = FrontConfig(model_name="tiny", model_dir=tmp_path, api_key="sk-secret-1", admin_key="sk-secret-2")
    clock = ClockPair.now()
    recording = start(
        core=core,
        front=front,
        clock=clock,
        token_log=TokenLogMode.HASHED,
        token_log_key=b"sk-secret-3-sk-secret-3",
        model_fingerprint="abc",
        command=["inferdbg", "serve", "--api-key", "sk-secret-4"],
        environ={"OMP_NUM_THREADS": "2", "HF_TOKEN": "sk-secret-5"},
        otlp_endpoint="http://u:sk-secret-6@127.0.0.1:9",
        slo_ttft_seconds=0.5,
    )
    recording.close()
    manifest = open_run(recording.run_dir).manifest
    text = json.dumps(manifest)
    assert "secret" not in text
    assert manifest["schema"] == "1.0"
    assert manifest["config"]["core"]["page_size"] == 32
    assert manifest["config"]["front"]["model_name"] == "tiny"
    assert manifest["environment"] == {"OMP_NUM_THREADS": "2"}
    assert manifest["model"] == {"name": "tiny", "fingerprint": "abc"}
    assert manifest["logged"]["token_log"] == "hashed"
    assert len(manifest["logged"]["token_log_key_id"]) == 16
    assert manifest["logged"]["slo_ttft_seconds"] == 0.5
    assert manifest["clock"] == {"wall_ns": clock.wall_ns, "monotonic_ns": clock.monotonic_ns}
    assert manifest["versions"]["python"]
    assert manifest["machine"]["num_cpus"] > 0
    assert manifest["ended"]["instrumentation_seconds"]["record"] > 0


def test_the_clock_pair_turns_monotonic_times_into_dates():
    pair = ClockPair(1_000_000, 400)
    assert pair.wall(650) == 1_000_250
    now = ClockPair.now()
    assert abs(now.wall(now.monotonic_ns) - now.wall_ns) == 0


def test_own_process_is_told_from_another():
    process = own_process()
    assert start_ticks(process["pid"]) == process["start_ticks"]
    assert start_ticks(2**22 + 1) is None


def test_versions_and_machine_name_what_is_there():
    assert {"python", "pyarrow", "inferdbg"} <= versions().keys()
    assert describe_machine()["cpu"]


def test_a_directory_outside_a_repository_has_no_commit(tmp_path):
    assert git_commit(tmp_path) is None


def test_a_replica_file_is_written_when_something_changed(tmp_path):
    file = ReplicaFile(tmp_path, "0", 3)
    file.update(dropped={"steps": 1})
    written = file.path.stat().st_mtime_ns, file.path.stat().st_ino
    file.update(dropped={"steps": 1})
    assert (file.path.stat().st_mtime_ns, file.path.stat().st_ino) == written
    file.update(dropped={"steps": 2})
    assert json.loads(file.path.read_text())["dropped"] == {"steps": 2}
    assert [path.name for path in (tmp_path / "replicas").iterdir()] == ["0.3.json"]


@pytest.mark.parametrize("when", ["start", "end"])
def test_a_manifest_that_cannot_be_written_is_tried_again(start, tmp_path, when):
    blocker = tmp_path / "place"
    blocker.touch()
    recording = start(run_dir=blocker / "run")
    if when == "start":
        blocker.unlink()
        recording.close()
        assert open_run(recording.run_dir).manifest["ended"]["reason"] == "stopped"
    else:
        recording.close()
        assert not Path(blocker / "run").exists()
