"""The token log of a run directory, as a comparison reads it. Knows the tables' columns, compares nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from inferdbg.engine.errors import UsageError
from inferdbg.probes.diff_tokens.document import Decoder
from inferdbg.probes.diff_tokens.report import RunDiff, manifest_diff
from inferdbg.probes.diff_tokens.rows import RowKey, RowSummary, TokenRow, digest_tokens, summarize_row
from inferdbg.probes.vocabulary import load_vocabulary
from inferdbg.tracing.reader import open_run

__all__ = ["RunTokenLog", "differing_settings", "names_apart", "warnings_of"]

_KEYS = (
    "request_id", "prompt_index", "choice_index", "client_request_id", "replay_of", "arrival_ns", "finish_reason",
)  # fmt: skip
_IDS = ("prompt_token_ids", "output_token_ids")
# They tell a request that was never accepted, and an empty output from one that was not logged.
_COUNTS = ("num_prompt_tokens", "num_output_tokens")
# What any two runs say differently of themselves.
_ALWAYS_DIFFERENT = (
    "run", "clock", "process", "ended", "command", "config.front.host", "config.front.port", "config.core.model_dir",
    "logged.replica", "logged.retain", "tokenizer.path", "otlp_endpoint",
)  # fmt: skip


class RunTokenLog:
    """One run's rows that have tokens: requests that were never accepted are left out, those in flight are there as far
    as they got."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """`name` is what messages call the run. Raises RunError."""
        self.run = open_run(path)
        self.name = name or path.name

    @property
    def hashed(self) -> bool:
        return self._logged.get("token_log") == "hashed"

    @property
    def key_id(self) -> str | None:
        """Names the key of a hashed log."""
        return self._logged.get("token_log_key_id")

    @cached_property
    def decoder(self) -> Decoder:
        return Decoder(None if self.hashed else load_vocabulary(self.run.tokenizer_dir))

    @property
    def described(self) -> dict[str, Any]:
        """The manifest, and under `engine` what the last core said of itself."""
        cores = [core for document in self.run.replicas if isinstance(core := document.get("core"), dict)]
        return self.run.manifest | {"engine": (cores[-1].get("info") or {}) if cores else {}}

    def summaries(self) -> Iterator[RowSummary]:
        for batch in self.run.requests((*_KEYS, *_COUNTS, *_IDS)):
            digests = [_digests(batch.column(name)) for name in _IDS]
            scalars = batch.select([*_KEYS, *_COUNTS]).to_pylist()
            for row, (prompt, num_prompt), (output, num_output) in zip(scalars, *digests, strict=True):
                if row["num_prompt_tokens"] is not None:
                    is_empty = output is None and prompt is not None and row["num_output_tokens"] == 0
                    yield RowSummary(
                        key=_key(row),
                        client_request_id=row["client_request_id"],
                        replay_of=row["replay_of"],
                        arrival_ns=row["arrival_ns"] or 0,
                        prompt_digest=prompt,
                        output_digest=digest_tokens(b"") if is_empty else output,
                        num_prompt=num_prompt,
                        num_output=num_output,
                        finish_reason=row["finish_reason"],
                    )
        yield from map(summarize_row, self._in_flight)

    def rows(self, keys: Collection[RowKey]) -> Iterator[TokenRow]:
        wanted = pa.array(sorted({key.request_id for key in keys}), pa.string())
        for batch in self.run.requests((*_KEYS, *_COUNTS, *_IDS, "output_logprobs", "sampling")):
            for row in batch.filter(pc.is_in(batch.column("request_id"), value_set=wanted)).to_pylist():
                if _key(row) in keys and row["num_prompt_tokens"] is not None:
                    yield _token_row(row)
        yield from (row for row in self._in_flight if row.key in keys)

    @cached_property
    def _in_flight(self) -> list[TokenRow]:
        rows = [row for flight in self.run.in_flight() for row in flight.rows()]
        # ids recovered from steps that are not complete have holes, which would look like differences
        return [_token_row(row if row["steps_complete"] else row | {"output_token_ids": None}) for row in rows]

    @property
    def _logged(self) -> dict[str, Any]:
        return self.run.manifest.get("logged") or {}


def names_apart(a: Path, b: Path) -> tuple[str, str]:
    """The shortest ends of two paths that tell them apart: ``run`` and ``other``, or ``a/run`` and ``b/run``."""
    parts_a, parts_b = (Path(os.path.abspath(path)).parts for path in (a, b))
    longest = max(len(parts_a), len(parts_b))
    length = next((n for n in range(1, longest + 1) if parts_a[-n:] != parts_b[-n:]), 1)
    return str(Path(*parts_a[-length:])), str(Path(*parts_b[-length:]))


def warnings_of(a: RunTokenLog, b: RunTokenLog, diff: RunDiff) -> list[str]:
    """What could not be read of the two, and what retention deleted of one that the other may still have."""
    found = [f"{log.name}: {warning}" for log in (a, b) for warning in log.run.warnings]
    for log, other, unmatched in ((a, b, diff.unmatched_b), (b, a, diff.unmatched_a)):
        gone = log.run.deleted["tables"].get("requests")
        if gone and unmatched:
            rows = "rows" if gone["rows"] is None else f"{gone['rows']:,} rows"
            found.append(
                f"{log.name}: retention deleted {rows} of its token log; what is only in {other.name} may have been "
                "among them (a larger --retain keeps more)"
            )
    return found


def differing_settings(a: RunTokenLog, b: RunTokenLog) -> list[dict[str, Any]]:
    """What the two manifests say differently about model, tokenizer, settings, versions and machine.

    Raises:
        UsageError: hashed logs under two keys, or only one of them hashed: no token of them can be compared.
    """
    if a.hashed != b.hashed or a.key_id != b.key_id:
        raise UsageError(
            f"{a.name} and {b.name} were not hashed with the same key, so their tokens cannot be compared; "
            "record both with the same --token-log-key, or with --token-log ids"
        )
    return manifest_diff(a.described, b.described, _ALWAYS_DIFFERENT)


def _key(row: dict[str, Any]) -> RowKey:
    return RowKey(row["request_id"], row["prompt_index"] or 0, row["choice_index"] or 0)


def _token_row(row: dict[str, Any]) -> TokenRow:
    prompt, output = _whole(row["prompt_token_ids"]), _whole(row["output_token_ids"])
    if prompt is not None and output is None and row["num_output_tokens"] == 0:
        output = []  # it ended before its first token
    return TokenRow(
        key=_key(row),
        client_request_id=row["client_request_id"],
        replay_of=row["replay_of"],
        arrival_ns=row["arrival_ns"] or 0,
        prompt=prompt,
        output=output,
        logprobs=row.get("output_logprobs") or [],
        sampling=row.get("sampling"),
        finish_reason=row.get("finish_reason"),
    )


def _whole(ids: list[int | None] | None) -> list[int] | None:
    """The ids, if all of them are known."""
    return None if ids is None or any(i is None for i in ids) else [i for i in ids if i is not None]


def _digests(column: Any) -> list[tuple[bytes | None, int]]:
    """Digest and length of every list of a column, without making Python integers of them."""
    values = np.ascontiguousarray(column.values.to_numpy(zero_copy_only=False), dtype="<i8")
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    return [
        (digest_tokens(values[start:stop].tobytes()), int(stop - start)) if valid else (None, 0)
        for start, stop, valid in zip(offsets[:-1], offsets[1:], column.is_valid().to_pylist(), strict=True)
    ]
