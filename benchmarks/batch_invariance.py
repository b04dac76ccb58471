"""`python -m benchmarks.batch_invariance`: what `batch_invariant` costs, as ratios to the plain path in one run.

A random model of SmolLM2's shape in bfloat16 on the CPU; rounds of both modes alternate, so that a busy machine slows
both. Prints one JSON line.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common import bootstrap_ratio, log, report
from benchmarks.gpu_check import SMOLLM2, Bench, make_requests


def cost(rounds: int) -> dict[str, Any]:
    """Seconds of a median decode step (alone, and 16 together) and of a 512-token prefill, invariant over plain."""
    bench = Bench(SMOLLM2, "bfloat16")
    figures: dict[str, Any] = {}
    for name, num, num_prompt, num_output in (
        ("decode_1", 1, 160, 12),
        ("decode_16", 16, 160, 6),
        ("prefill_512", 1, 512, 1),
    ):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for round_ in range(rounds):
            for invariant in (False, True):
                requests = make_requests(SMOLLM2.vocab_size, num, num_prompt, num_output, first=round_ * num)
                _, records = bench.run("cpu", requests, batch_invariant=invariant)
                is_prefill = name.startswith("prefill")
                steps = sorted(
                    record.execute_ns / 1e9
                    for record in records
                    if record.chunk_is_prefill == ((True,) if is_prefill else (False,) * num)
                )
                seconds[invariant].append(steps[len(steps) // 2])
            log(f"{name}: plain {seconds[False][-1] * 1e3:.0f} ms, invariant {seconds[True][-1] * 1e3:.0f} ms")
        figures[f"{name}_ratio"] = bootstrap_ratio(seconds[True], seconds[False])
        figures[f"{name}_plain_ms"] = round(min(seconds[False]) * 1e3, 1)
        figures[f"{name}_invariant_ms"] = round(min(seconds[True]) * 1e3, 1)
    return figures | {"threads": torch.get_num_threads()}


def main() -> None:
    """Parses the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_invariance", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--keep", action="store_true", help="append to benchmarks/results.jsonl")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    report("batch_invariance", cost(options.rounds), keep=options.keep)


if __name__ == "__main__":
    main()
