"""What every benchmark shares: who measured, how a figure is summed up, where a line is kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["RESULTS", "bootstrap_ratio", "log", "machine", "report"]

RESULTS = Path(__file__).with_name("results.jsonl")
PACKAGES = ("torch", "transformers", "numba", "uvicorn", "starlette", "msgspec", "opentelemetry-sdk")


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, and the versions that matter."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
    }


def commit() -> str | None:
    """The checkout's commit, with `+` when files differ from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def bootstrap_ratio(a: Sequence[float], b: Sequence[float], *, rounds: int = 2000, seed: int = 0) -> dict[str, float]:
    """The median of the paired ratios a[i] / b[i] with a 95% percentile-bootstrap interval over the pairs."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    random = Random(seed)
    resampled = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return {
        "ratio": round(statistics.median(ratios), 4),
        "low": round(resampled[int(0.025 * rounds)], 4),
        "high": round(resampled[int(0.975 * rounds) - 1], 4),
        "pairs": len(ratios),
    }


def log(message: str) -> None:
    """A line of progress on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def report(name: str, figures: dict[str, Any], *, keep: bool) -> None:
    """Prints one JSON line on stdout and, with `keep`, appends it to results.jsonl."""
    line = json.dumps(
        {
            "benchmark": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            **figures,
            "machine": machine(),
        }
    )
    print(line, flush=True)
    if keep:
        with RESULTS.open("a") as file:
            file.write(line + "\n")
