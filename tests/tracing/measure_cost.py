"""CPU time that recording takes per request and per step: `python tests/tracing/measure_cost.py`. One JSON line each.

Synthetic events with random ids, handed over at the pace of a fast engine; times are those of the threads themselves
(`Recording.cpu_seconds`), so a busy machine disturbs them less than it would a clock.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from factories import MS, START_NS, arrived, choice, closed, core_started, step

from inferdbg.engine.serving.events import Event
from inferdbg.tracing.recording_config import RecordingConfig
from inferdbg.tracing.session import start_recording
from inferdbg.tracing.token_log import TokenLogMode

VOCABULARY = 49152
NUM_PROMPT, NUM_OUTPUT, NUM_SEQUENCES = 128, 200, 16
rng = random.Random(0)


def ids(number: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(number))


def logprobs(number: int) -> tuple[float, ...]:
    return tuple(-rng.expovariate(1) for _ in range(number))


def request(index: int) -> list[Event]:
    arrival = arrived(f"r{index}", prompts=(ids(NUM_PROMPT),), seq_ids=(index,))
    times = tuple(START_NS + 16 * MS + n * 25 * MS + rng.randrange(MS) for n in range(NUM_OUTPUT))
    record = choice(
        ids(NUM_OUTPUT),
        seq_id=index,
        output_logprobs=logprobs(NUM_OUTPUT),
        top_ids=ids(2 * NUM_OUTPUT),
        top_logprobs=logprobs(2 * NUM_OUTPUT),
        token_times_ns=times,
    )
    return [arrival, closed(arrival, choices=(record,))]


def one_step(index: int) -> list[Event]:
    seqs = tuple(range(NUM_SEQUENCES))
    return [
        step(
            index,
            seqs,
            sampled_ids=ids(NUM_SEQUENCES),
            sampled_logprobs=logprobs(NUM_SEQUENCES),
            sampled_top_ids=ids(2 * NUM_SEQUENCES),
            sampled_top_logprobs=logprobs(2 * NUM_SEQUENCES),
        )
    ]


def measure(what: str, make: Callable[[int], list[Event]], number: int, pause: float, mode: TokenLogMode) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        recording = start_recording(RecordingConfig(run_dir=run_dir, token_log=mode, token_log_key=bytes(32)))
        recording.observer(core_started())
        for index in range(NUM_SEQUENCES):
            recording.observer(arrived(f"q{index}", seq_ids=(index,)))
        items = [make(index) for index in range(number)]
        recording.flush()
        before = recording.cpu_seconds()
        for item in items:
            for event in item:
                recording.observer(event)
            time.sleep(pause)
        recording.flush()
        recording.close()
        after = recording.cpu_seconds()
        sizes = {path.parent.name: path.stat().st_size for path in run_dir.rglob("0.*") if path.suffix != ".json"}
    micros = {place: round((after[place] - before.get(place, 0.0)) / number * 1e6, 1) for place in after}
    bytes_each = {table: round(size / number) for table, size in sizes.items()}
    print(json.dumps({"what": what, "token_log": mode.value, "cpu_us": micros, "bytes": bytes_each}))


def main() -> None:
    for mode in (TokenLogMode.IDS, TokenLogMode.HASHED):
        measure("request of 128 prompt and 200 output tokens", request, 400, 0.005, mode)
        measure("step of 16 sequences", one_step, 2000, 0.002, mode)


if __name__ == "__main__":
    main()
