"""What recording costs: the same load with `--trace` and without, in pairs, and the CPU seconds it says it used."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.client import run_client
from benchmarks.common import bootstrap_ratio, log
from benchmarks.servers import Server, inferdbg_server
from benchmarks.serving import (
    CONCURRENCY,
    NUM_REQUESTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    completion_body,
    model_name,
    random_prompt,
)

__all__ = ["recording"]

INSTRUMENTATION = "inferdbg_instrumentation_seconds_total"


def _burst(server: Server, name: str, random: Random, count: int = NUM_REQUESTS) -> float:
    bodies = [completion_body(name, random_prompt(random, PROMPT_TOKENS), OUTPUT_TOKENS) for _ in range(count)]
    return asyncio.run(run_client(f"{server.url}/v1/completions", bodies, CONCURRENCY)).wall


def recording(model: Path, *, rounds: int) -> dict[str, Any]:
    """The ratio of wall seconds on / off, and the share of the server's CPU seconds spent in instrumentation."""
    random = Random(11)
    on_walls: list[float] = []
    off_walls: list[float] = []
    shares: list[float] = []
    with contextlib.ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        on = stack.enter_context(inferdbg_server(model, "--trace", "--run-dir", str(run_dir)))
        off = stack.enter_context(inferdbg_server(model))
        name = model_name(on.url)
        for server in (on, off):
            _burst(server, name, random, CONCURRENCY)
        for index in range(rounds):
            spent, cpu = on.metric(INSTRUMENTATION), on.cpu_seconds()
            pair = [(on, on_walls), (off, off_walls)]
            for server, walls in pair if index % 2 == 0 else reversed(pair):
                walls.append(_burst(server, name, random))
            shares.append((on.metric(INSTRUMENTATION) - spent) / (on.cpu_seconds() - cpu))
            log(f"on {on_walls[-1]:.2f} s, off {off_walls[-1]:.2f} s, instrumentation {shares[-1]:.2%} of CPU")
    return {
        "workload": f"{NUM_REQUESTS} x ({PROMPT_TOKENS} -> {OUTPUT_TOKENS}), {CONCURRENCY} at a time, bf16",
        "rounds": rounds,
        "wall on / off": bootstrap_ratio(on_walls, off_walls),
        "instrumentation share of CPU seconds": round(statistics.median(shares), 5),
        "wall seconds": {"on": round(statistics.median(on_walls), 3), "off": round(statistics.median(off_walls), 3)},
    }
