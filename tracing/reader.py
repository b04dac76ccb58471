"""Reads a run directory, while it is written, after it was closed, and after its writer was killed.

Every reading command goes through `open_run`. Memory is bounded: tables come in record batches. Knows no rendering.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from inferdbg.engine.errors import RunError
from inferdbg.engine.serving.events import Boundaries, Stage, stages_of
from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.deletions import sum_deleted
from inferdbg.tracing.in_flight import InFlight, PartialOutput, find_in_flight
from inferdbg.tracing.losses import SIGNALS
from inferdbg.tracing.machine import own_process, start_ticks
from inferdbg.tracing.run_files import MANIFEST, REPLICAS, TABLE_NAMES, read_json, require_objects
from inferdbg.tracing.schema import SCHEMA_MAJOR, TABLES
from inferdbg.tracing.segment_reader import SegmentReader

__all__ = ["InFlight", "PartialOutput", "Row", "Run", "RunStatus", "open_run", "row_stages"]

Row = dict[str, Any]
_SILENT_SECONDS = 60.0


class RunStatus(StrEnum):
    """open: being written; closed: ended in order; lost: its writer is gone and did not say why."""

    OPEN = "open"
    CLOSED = "closed"
    LOST = "lost"


def open_run(path: Path | str) -> Run:
    """Opens a run directory.

    Raises:
        RunError: it is absent, no run, or written by a newer major version.
    """
    path = Path(path)
    if not path.exists():
        raise RunError(f"{path}: no such run directory")
    try:
        manifest = read_json(path / MANIFEST)
        major = int(str(manifest["schema"]).split(".")[0])
        require_objects(manifest, ("ended", "process", "model", "config", "logged", "tokenizer"))
        ClockPair(int(manifest["clock"]["wall_ns"]), int(manifest["clock"]["monotonic_ns"]))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path} is not a run: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}/{MANIFEST} cannot be read: {type(error).__name__}: {error}") from None
    if major > SCHEMA_MAJOR:
        raise RunError(
            f"{path} has schema {manifest['schema']}, this inferdbg reads up to {SCHEMA_MAJOR}.x: use a newer inferdbg"
        )
    return Run(path, manifest)


class Run:
    """One run, as it was when its tables were first read: a reader that passes over it twice sees the same twice.

    To see what an open run has got since, open it again.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        is_live = self.status is RunStatus.OPEN
        self._tables = {name: SegmentReader(path / name, schema, is_live=is_live) for name, schema in TABLES.items()}
        self._warnings: list[str] = []
        self._has_looked = False

    @property
    def clock(self) -> ClockPair:
        """Turns the run's monotonic times into dates."""
        clock = self.manifest["clock"]
        return ClockPair(int(clock["wall_ns"]), int(clock["monotonic_ns"]))

    @cached_property
    def status(self) -> RunStatus:
        """As it was when first asked."""
        if self.manifest.get("ended"):
            return RunStatus.CLOSED
        return RunStatus.OPEN if _writer_lives(self.path, self.manifest.get("process") or {}) else RunStatus.LOST

    @cached_property
    def replicas(self) -> list[dict[str, Any]]:
        """The documents of `replicas/`, by replica and incarnation."""
        documents, self._warnings = _replica_documents(self.path)
        return documents

    @property
    def dropped(self) -> dict[str, int]:
        """What was lost, by signal: as the manifest says at the end, else as each replica said last."""
        ended = self.manifest.get("ended")
        documents = [ended] if ended else _last_of_each(self.replicas)
        total = dict.fromkeys(SIGNALS, 0)
        for document in documents:
            for signal, count in (document.get("dropped") or {}).items():
                total[signal] = total.get(signal, 0) + int(count)
        return total

    @property
    def deleted(self) -> dict[str, Any]:
        """What retention deleted by now: `segments`, `bytes`, and `tables`, each with its `segments` and `rows` (None:
        not known). A table of which nothing was deleted is not there.
        """
        return sum_deleted(self._deleted_by_replica().values())

    @property
    def warnings(self) -> list[str]:
        """What could not be read, as far as has been read."""
        return [*self._warnings, *(w for table in self._tables.values() for w in table.warnings.values())]

    def requests(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Record batches of the token log, one row per choice; rows of one request are adjacent.

        Raises KeyError for a column that the schema lacks, as `steps` and `arrivals` do.
        """
        return self._table("requests").batches(columns)

    def steps(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Record batches of the engine's steps."""
        return self._table("steps").batches(columns)

    def arrivals(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Record batches of accepted requests."""
        return self._table("arrivals").batches(columns)

    def in_flight(self) -> list[InFlight]:
        """Requests that arrived and have no end, with what their sequences had sampled, by arrival."""
        self._look()
        # asked for after the tables have been read: what is deleted is announced before it goes
        return find_in_flight(self._tables, self._deleted_by_replica)

    def find_request(self, key: str) -> list[Row]:
        """The rows of one request, by (prompt_index, choice_index); of one in flight, what is known of it so far.

        `key` is a request id, else a client's request id, else a unique beginning of either. A request in
        flight has `end` None, one row per sequence, and `output_token_ids` as recovered from the steps.

        Raises:
            RunError: nothing matches, or more than one request does.
        """
        request_id = self._resolve(key)
        wanted = pa.scalar(request_id)
        rows: list[Row] = []
        reader = self._table("requests")
        for name in reader.segments():
            ids = pa.chunked_array([b.column(0) for b in reader.segment(name, ["request_id"])], pa.string())
            if not pc.any(pc.equal(ids, wanted)).as_py():
                continue
            for batch in reader.segment(name):
                rows += batch.filter(pc.equal(batch.column("request_id"), wanted)).to_pylist()
        if not rows:
            rows = [row for flight in self.in_flight() if flight.request_id == request_id for row in flight.rows()]
        return sorted(rows, key=lambda row: (row["prompt_index"] or 0, row["choice_index"] or 0))

    @property
    def tokenizer_dir(self) -> Path | None:
        """Where the run keeps its tokenizer's files."""
        relative = (self.manifest.get("tokenizer") or {}).get("path")
        if not isinstance(relative, str):
            return None
        directory = (self.path / relative).resolve()
        # a manifest is input like any other: it must not point out of the run
        inside = directory.is_relative_to(self.path.resolve())
        return directory if inside and directory.is_dir() else None

    def _table(self, name: str) -> SegmentReader:
        self._look()
        return self._tables[name]

    def _look(self) -> None:
        """Fixes what is read, in the order in which a request passes through the tables: one that closes meanwhile is
        in flight or ended, never both or neither."""
        if not self._has_looked:
            self._has_looked = True
            for name in TABLE_NAMES:
                self._tables[name].look()

    def _deleted_by_replica(self) -> dict[str, dict[str, Any]]:
        documents, _ = _replica_documents(self.path)
        return {str(doc.get("replica")): doc.get("deleted") or {} for doc in _last_of_each(documents)}

    def _resolve(self, key: str) -> str:
        key = key.encode("utf-8", "backslashreplace").decode()
        wanted = pa.scalar(key)
        exact = False
        by_client: dict[str, str | None] = {}  # a request's id to its client's
        by_prefix: dict[str, str | None] = {}
        for table in ("arrivals", "requests"):
            for batch in self._table(table).batches(["request_id", "client_request_id"]):
                ids, clients = batch.column(0), batch.column(1)
                exact = exact or bool(pc.any(pc.equal(ids, wanted)).as_py())
                begins = pc.or_kleene(pc.starts_with(ids, pattern=key), pc.starts_with(clients, pattern=key))
                for names, is_wanted in ((by_client, pc.equal(clients, wanted)), (by_prefix, begins)):
                    if key:  # the empty one begins all of them
                        matches = batch.filter(is_wanted)
                        names.update(zip(matches.column(0).to_pylist(), matches.column(1).to_pylist(), strict=True))
        if exact:
            return key
        found = by_client or by_prefix
        if len(found) == 1:
            return next(iter(found))
        if not found:
            raise RunError(f"{self.path} has no request {key!r}; `inferdbg show {self.path} --requests` lists its own")
        named = [f"{name} ({client})" if client else name for name, client in sorted(found.items())]
        listed = ", ".join(named[:5]) + (", …" if len(named) > 5 else "")
        raise RunError(f"{key!r} fits {len(found)} requests of {self.path}: {listed}")


def _replica_documents(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The documents of `replicas/` in order, and what is wrong with those that cannot be read."""
    found, problems = [], []
    for file in sorted((path / REPLICAS).glob("*.json")):
        try:
            document = read_json(file)
            require_objects(document, ("core", "dropped", "deleted"))
            found.append(document | {"incarnation": int(document.get("incarnation") or 0)})
        except (OSError, ValueError, TypeError) as error:
            problems.append(f"{REPLICAS}/{file.name}: {error}")
    return sorted(found, key=lambda doc: (str(doc.get("replica")), doc["incarnation"])), problems


def _last_of_each(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each replica the document of its last core: a writer's counts go on from one to the next."""
    return list({doc.get("replica"): doc for doc in documents}.values())


def row_stages(row: Row) -> tuple[Stage, ...]:
    """The stages of the request that a row belongs to, gapless; they add up to its E2E. Empty while it is in flight."""
    known = row.get("request_boundaries")
    if not known or row.get("closed_ns") is None or known.get("received_ns") is None:
        return ()
    names = Boundaries.__dataclass_fields__
    boundaries = Boundaries(**{name: value for name, value in known.items() if name in names})
    return stages_of(boundaries, row["closed_ns"])


def _writer_lives(path: Path, process: dict[str, Any]) -> bool:
    """Whether the process that writes the run still runs. Seen from another host or container, by its recent writes."""
    own = own_process()
    here = all(own[name] == process.get(name) for name in ("boot_id", "pid_namespace")) and own["boot_id"] is not None
    pid = process.get("pid")
    if here and isinstance(pid, int):
        return start_ticks(pid) is not None and start_ticks(pid) == process.get("start_ticks")
    newest = max((file.stat().st_mtime for file in _files(path)), default=0.0)
    return time.time() - newest < _SILENT_SECONDS


def _files(path: Path) -> Iterator[Path]:
    for root, _, names in os.walk(path):
        for name in names:
            file = Path(root) / name
            if file.exists():
                yield file
