"""Writes what a run says about itself: `run.json` and one `replicas/<id>.<incarnation>.json` per core. Knows no event.

Both are replaced as a whole. What goes in is picked by name; nothing is copied wholesale, so no key can slip in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.disclosure import disclose_command, disclose_environment, disclose_url
from inferdbg.tracing.machine import describe_machine, git_commit, own_process, versions
from inferdbg.tracing.run_files import MANIFEST, REPLICAS, write_json
from inferdbg.tracing.schema import SCHEMA_VERSION

__all__ = ["CORE_FIELDS", "FRONT_FIELDS", "Manifest", "ReplicaFile", "describe_config"]

CORE_FIELDS = (
    "model_dir", "device", "dtype", "num_threads", "max_model_len", "max_num_seqs", "token_budget", "page_size",
    "num_pages", "kv_memory_bytes", "prefix_cache", "policy", "batch_invariant", "fast_path", "decode_buckets",
    "top_logprobs", "client_credit",
)  # fmt: skip
FRONT_FIELDS = (
    "model_name", "host", "port", "max_body_bytes", "max_queued_requests", "max_batch_prompts", "tokenizer_threads",
    "stall_seconds", "slow_client_seconds", "drain_seconds",
)  # fmt: skip


def describe_config(core: CoreConfig | None, front: FrontConfig | None) -> dict[str, Any]:
    """The resolved configuration, without keys and without the test-only fault switch."""
    described: dict[str, Any] = {}
    if core is not None:
        described["core"] = {name: _plain(getattr(core, name)) for name in CORE_FIELDS if hasattr(core, name)}
    if front is not None:
        described["front"] = {name: _plain(getattr(front, name)) for name in FRONT_FIELDS if hasattr(front, name)}
    return described


class Manifest:
    """`run.json`, from the first write to `end`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        kind: str,
        clock: ClockPair,
        command: Sequence[str],
        environ: Mapping[str, str],
        config: Mapping[str, Any],
        logged: Mapping[str, Any],
        model: Mapping[str, Any],
        tokenizer: Mapping[str, Any] | None,
        otlp_endpoint: str | None,
    ) -> None:
        self._path = run_dir / MANIFEST
        self._document: dict[str, Any] = {
            "schema": SCHEMA_VERSION,
            "kind": kind,
            "run": run_dir.name,
            "clock": {"wall_ns": clock.wall_ns, "monotonic_ns": clock.monotonic_ns},
            "command": disclose_command(command),
            "environment": disclose_environment(environ),
            "config": dict(config),
            "model": dict(model),
            "tokenizer": dict(tokenizer) if tokenizer is not None else None,
            "logged": dict(logged),
            "otlp_endpoint": disclose_url(otlp_endpoint) if otlp_endpoint is not None else None,
            "versions": versions(),
            "git": git_commit(Path(__file__).resolve().parent),
            "machine": describe_machine(),
            "process": own_process(),
            "ended": None,
        }
        self.is_written = False

    def write(self) -> None:
        """Raises OSError."""
        write_json(self._path, self._document)
        self.is_written = True

    def touch(self) -> None:
        """A sign of life for readers on other hosts, who cannot look at the process. Raises OSError."""
        os.utime(self._path)

    def end(self, reason: str, clock: ClockPair, dropped: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Says how the run ended, what was lost, and the CPU seconds that recording took. Raises OSError."""
        self._document["ended"] = {
            "reason": reason,
            "wall_ns": clock.wall_ns,
            "monotonic_ns": clock.monotonic_ns,
            "dropped": dict(dropped),
            "instrumentation_seconds": dict(seconds),
        }
        self.write()


class ReplicaFile:
    """One core's file. `update` writes only what is new."""

    def __init__(self, run_dir: Path, replica: str, incarnation: int) -> None:
        self.path = run_dir / REPLICAS / f"{replica}.{incarnation}.json"
        self._document: dict[str, Any] = {"replica": replica, "incarnation": incarnation, "core": None, "lost": None}
        self._written: dict[str, Any] | None = None

    def update(self, **fields: Any) -> None:
        """Sets fields and writes the file if anything changed since the last write that worked. Raises OSError."""
        self._document |= fields
        if self._document != self._written:
            write_json(self.path, self._document)
            self._written = dict(self._document)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
