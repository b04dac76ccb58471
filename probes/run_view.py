"""The `show RUN --json` document: the summary of a run, and what a person asks next. Knows no rendering."""

from __future__ import annotations

import heapq
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from inferdbg.engine.serving.events import EndKind
from inferdbg.tracing.reader import Run, RunStatus
from inferdbg.tracing.schema import REQUESTS
from inferdbg.tracing.summary import summarize

__all__ = ["REQUESTS_SCHEMA", "list_requests", "requests_document", "run_document", "run_name"]

REQUESTS_SCHEMA = "inferdbg.show-requests/1"
NUM_SLOWEST = 5
_ROWS_AT_ONCE = 1000
_COLUMNS = (
    "request_id", "client_request_id", "end", "error_type", "arrival_ns", "closed_ns", "request_boundaries",
    "num_prompt_tokens", "num_output_tokens", "choice_index",
)  # fmt: skip


def run_document(run: Run) -> dict[str, Any]:
    """`inferdbg.show/1`: the summary's fields, and beside them who and what ran, the slowest requests, the causes of
    ends other than finished."""
    summary = summarize(run)
    slowest, causes = _requests(run)
    document = summary.to_json()
    manifest = run.manifest
    return document | {
        "run": run_name(run.path),
        "kind": manifest.get("kind"),
        "duration_seconds": _duration(run),
        "ended_because": (manifest.get("ended") or {}).get("reason"),
        "about": _about(run),
        "logged": manifest.get("logged"),
        "instrumentation_seconds": (manifest.get("ended") or {}).get("instrumentation_seconds"),
        "restarts": sum(int(replica.get("incarnation") or 0) > 0 for replica in run.replicas),
        "causes": causes,
        "slowest": slowest,
    }


def run_name(path: Path) -> str:
    """What the run's directory is called, also where the path to it is ``.``."""
    return Path(os.path.abspath(path)).name


def requests_document(run: Run) -> dict[str, Any]:
    """`inferdbg.show-requests/1`: what is said once; its `requests` are what `list_requests` gives."""
    return {"schema": REQUESTS_SCHEMA, "run": run_name(run.path), "status": run.status.value}


def list_requests(run: Run) -> Iterator[dict[str, Any]]:
    """Every request, oldest first; `end` is None while it is in flight. Keeps a few columns of the run in memory."""
    rows = pa.Table.from_batches(run.requests(_COLUMNS), pa.schema([REQUESTS.field(name) for name in _COLUMNS]))
    ended = rows.sort_by([("arrival_ns", "ascending"), ("request_id", "ascending")]).to_batches(_ROWS_AT_ONCE)
    in_flight = (row for flight in run.in_flight() for row in flight.rows())
    grouped = (_by_request(row for batch in ended for row in batch.to_pylist()), _by_request(in_flight))
    for row in heapq.merge(*grouped, key=lambda row: int(row["arrival_ns"])):
        took_ns = None if row["closed_ns"] is None else row["closed_ns"] - row["arrival_ns"]
        yield _told(row, took_ns) | {"error_type": row["error_type"], "arrival_ns": row["arrival_ns"]}


def _duration(run: Run) -> float | None:
    """Seconds from the start to the end, or to now; None where nobody knows when it ended."""
    if run.status is RunStatus.LOST:
        return None
    ended = run.manifest.get("ended")
    wall_ns = int(ended["wall_ns"]) if ended else time.time_ns()
    return max(0, wall_ns - run.clock.wall_ns) / 1e9


def _about(run: Run) -> dict[str, str]:
    """What ran, in a few words each; a figure that is not known is left out."""
    manifest = run.manifest
    core: dict[str, Any] = (manifest.get("config") or {}).get("core") or {}
    machine, versions = manifest.get("machine") or {}, manifest.get("versions") or {}
    loaded = next((r["core"].get("info") or {} for r in run.replicas if isinstance(r.get("core"), dict)), {})
    hardware = ", ".join([*(machine.get("gpus") or []), f"{machine.get('num_usable_cpus')} × {machine.get('cpu')}"])
    differing = [
        f"{name}={value}"
        for name, value in core.items()
        if name in _TELLING and value not in (None, [], _TELLING[name])
    ]
    started = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(run.clock.wall_ns / 1e9))
    return {
        "started": started,
        "model": " ".join(
            str(part)
            for part in (
                (manifest.get("model") or {}).get("name"),
                core.get("dtype"),
                core.get("device"),
                loaded.get("forward"),
            )
            if part
        ),
        "settings": ", ".join(differing),
        "machine": hardware if machine else "",
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("inferdbg", "torch") if name in versions),
    }


_TELLING: dict[str, Any] = {
    "max_num_seqs": None, "token_budget": None, "page_size": None, "prefix_cache": True, "batch_invariant": False,
    "policy": "fcfs", "decode_buckets": (), "fast_path": "auto",
}  # fmt: skip
"""Settings worth a glance, and the value that goes without saying."""


def _requests(run: Run) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The slowest requests, and how many of each cause did not finish."""
    causes: Counter[str] = Counter()
    slowest: list[tuple[int, int, dict[str, Any]]] = []
    for position, row in enumerate(_by_request(row for batch in run.requests(_COLUMNS) for row in batch.to_pylist())):
        if row["end"] != EndKind.FINISHED:
            causes[f"{row['end']}: {row['error_type'] or 'unknown'}"] += 1
        if row["num_prompt_tokens"] is not None:  # it was accepted
            heapq.heappush(slowest, (row["closed_ns"] - row["arrival_ns"], position, row))
            if len(slowest) > NUM_SLOWEST:
                heapq.heappop(slowest)
    return [_told(row, took) for took, _, row in sorted(slowest, reverse=True)], dict(causes.most_common())


def _by_request(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per request (whose rows are adjacent) with the tokens of all its prompts and of all their choices."""
    for _, group in groupby(rows, key=lambda row: row["request_id"]):
        same = list(group)
        prompts = [row["num_prompt_tokens"] for row in same if not row["choice_index"]]  # each prompt once
        yield same[0] | {
            "num_prompt_tokens": _sum(prompts),
            "num_output_tokens": _sum(r["num_output_tokens"] for r in same),
        }


def _sum(numbers: Iterable[int | None]) -> int | None:
    """Of what is known; None where nothing is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _told(row: dict[str, Any], took_ns: int | None) -> dict[str, Any]:
    first_token = (row["request_boundaries"] or {}).get("first_token_ns")
    return {
        "request_id": row["request_id"],
        "client_request_id": row["client_request_id"],
        "end": row["end"],
        "e2e_seconds": None if took_ns is None else took_ns / 1e9,
        "ttft_seconds": None if first_token is None else (first_token - row["arrival_ns"]) / 1e9,
        "prompt_tokens": row["num_prompt_tokens"],
        "output_tokens": row["num_output_tokens"],
    }
