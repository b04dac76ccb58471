"""Records the golden run of the current schema: `python tests/tracing/golden/make_golden.py`.

Run once per released schema; what it wrote stays as it is, so that every later reader is tested against it.
One core is recorded to its end and sealed; of a second one the live streams are left, as a killed server leaves them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from factories import Script, arrived, closed, core_started, rejected, step  # noqa: E402

from inferdbg.engine.serving.events import EndKind, EngineLost  # noqa: E402
from inferdbg.tracing.clock import ClockPair  # noqa: E402
from inferdbg.tracing.recording_config import RecordingConfig  # noqa: E402
from inferdbg.tracing.run_files import MANIFEST  # noqa: E402
from inferdbg.tracing.schema import SCHEMA_VERSION  # noqa: E402
from inferdbg.tracing.session import start_recording  # noqa: E402

CLOCK = ClockPair(1_796_000_000_000_000_000, 5_000_000_000_000)


def main() -> None:
    target = HERE / SCHEMA_VERSION
    shutil.rmtree(target, ignore_errors=True)
    recording = start_recording(RecordingConfig(run_dir=target, clock=CLOCK, log_text=True))
    lost = arrived("lost", seq_ids=(50,), client_request_id="client-lost")
    for event in Script(num_requests=2, num_tokens=4).run():
        recording.observer(event)
    recording.observer(rejected())
    recording.observer(lost)
    recording.observer(step(5, (50,)))
    recording.observer(EngineLost(incarnation=1, time_ns=CLOCK.monotonic_ns, reason="killed", request_ids=("lost",)))
    recording.observer(closed(lost, end=EndKind.FAILED, error_type="engine_lost", choices=()))
    recording.observer(core_started(2))
    recording.observer(arrived("open", seq_ids=(0,), client_request_id="client-open"))
    for number in (1, 2, 3):
        recording.observer(step(number, (0,)))
    recording.flush()
    streams = {path: path.read_bytes() for path in target.rglob("0.2.*.arrows")}
    recording.close()
    for path, data in streams.items():
        path.with_suffix(".parquet").unlink()
        path.write_bytes(data)
    manifest = json.loads((target / MANIFEST).read_text())
    manifest |= {"ended": None, "machine": {"cpu": "golden", "num_cpus": 2, "num_usable_cpus": 2, "gpus": []}}
    manifest["process"] = {"pid": 1, "start_ticks": 1, "boot_id": "golden", "pid_namespace": "golden"}
    manifest["git"] = None
    (target / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
