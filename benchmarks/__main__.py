"""`python -m benchmarks [NAME …]`: runs benchmarks, prints one JSON line each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.recording import recording
from benchmarks.serving import serving
from benchmarks.soak import soak
from inferdbg.engine.core.acquire import resolve_model


def main() -> None:
    """Parses the command line; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=["serving", "recording"], help="serving, recording, soak")
    parser.add_argument("--model", default="smollm2", help="alias, checkpoint directory or GGUF file")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--vllm", type=Path, help="the python of an environment with vLLM's CPU build")
    parser.add_argument("--soak-seconds", type=float, default=600.0)
    parser.add_argument("--keep", action="store_true", help="append to benchmarks/results.jsonl")
    options = parser.parse_args()
    model = resolve_model(options.model)
    table: dict[str, Callable[[], dict[str, Any]]] = {
        "serving": lambda: serving(model, rounds=options.rounds, vllm=options.vllm),
        "recording": lambda: recording(model, rounds=options.rounds),
        "soak": lambda: soak(model, seconds=options.soak_seconds),
    }
    for name in options.names:
        if name not in table:
            parser.error(f"no benchmark {name!r}; there are {', '.join(table)}")
        report(name, table[name](), keep=options.keep)


if __name__ == "__main__":
    main()
