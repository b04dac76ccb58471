"""Compares two token logs as wholes: matches, compares, sums up. Memory is bounded whatever the size of the runs.

Two passes: the first keeps a digest of every row, which settles all identical pairs; the second loads only
the pairs that differ, some megabytes of tokens at a time. Knows token logs by a protocol, no file format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from inferdbg.probes.diff_tokens.compare import PairReport, Undecided, Verdict, compare_rows, is_cut_off
from inferdbg.probes.diff_tokens.matching import Pair, match
from inferdbg.probes.diff_tokens.rows import RowKey, RowSummary, TokenRow

__all__ = ["RunDiff", "TokenLog", "diff_runs", "manifest_diff"]

TOKENS_PER_BATCH = 4_000_000  # of differing pairs in memory at a time; about 40 bytes each as Python integers


class TokenLog(Protocol):
    """One run's token log."""

    @property
    def hashed(self) -> bool:
        """Ids are chained keyed hashes: comparable up to the first difference only."""
        ...

    def summaries(self) -> Iterator[RowSummary]:
        """Every row that has a place in a comparison; one pass over the run."""
        ...

    def rows(self, keys: Collection[RowKey]) -> Iterator[TokenRow]:
        """The rows of `keys`; one pass over the run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """Two runs, compared. `pairs` are in order of arrival in run A."""

    pairs: list[PairReport]
    unmatched_a: list[RowSummary]
    unmatched_b: list[RowSummary]
    hashed: bool
    counts: Mapping[Verdict, int] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The weightiest verdict of any pair: a difference wins, and no pair that is identical speaks for one that is
        not decided. Inconclusive too where there is no pair."""
        for verdict in (Verdict.INPUT_DIFFERS, Verdict.OUTPUT_DIFFERS, Verdict.SAMPLING_DIFFERS, Verdict.INCONCLUSIVE):
            if self.counts.get(verdict):
                return verdict
        return Verdict.IDENTICAL if self.pairs else Verdict.INCONCLUSIVE

    @property
    def is_different(self) -> bool:
        return self.verdict not in (Verdict.IDENTICAL, Verdict.INCONCLUSIVE)

    @property
    def undecided(self) -> Mapping[Undecided, int]:
        """How many pairs lack what to be decided."""
        return Counter(report.undecided for report in self.pairs if report.undecided is not None)

    @property
    def has_unmatched(self) -> bool:
        return bool(self.unmatched_a or self.unmatched_b)


def diff_runs(a: TokenLog, b: TokenLog, tokens_per_batch: int = TOKENS_PER_BATCH) -> RunDiff:
    """Matches and compares all requests of two runs."""
    matching = match(a.summaries(), b.summaries())
    hashed = a.hashed or b.hashed
    reports: dict[RowKey, PairReport] = {}
    for batch in _batches([pair for pair in matching.pairs if not _settled(pair)], tokens_per_batch):
        rows_a = {row.key: row for row in a.rows({pair.a.key for pair in batch})}
        rows_b = {row.key: row for row in b.rows({pair.b.key for pair in batch})}
        for pair in batch:
            row_a, row_b = rows_a.get(pair.a.key), rows_b.get(pair.b.key)
            if row_a is None or row_b is None:  # retention took the segment since the first pass
                reports[pair.a.key] = _unread(pair, Undecided.DELETED)
            else:
                reports[pair.a.key] = compare_rows(row_a, row_b, pair.matched_by, hashed=hashed)
    pairs = [reports.get(pair.a.key) or _unread(pair) for pair in matching.pairs]
    return RunDiff(
        pairs=pairs,
        unmatched_a=matching.unmatched_a,
        unmatched_b=matching.unmatched_b,
        hashed=hashed,
        counts=Counter(report.verdict for report in pairs),
    )


def _settled(pair: Pair) -> bool:
    a, b = pair.a, pair.b
    if a.prompt_digest is None or a.output_digest is None:
        return False
    if a.prompt_digest != b.prompt_digest or a.output_digest != b.output_digest:
        return False
    return not is_cut_off(a.num_output, (a.num_output, a.finish_reason), (b.num_output, b.finish_reason))


def _unread(pair: Pair, undecided: Undecided | None = None) -> PairReport:
    """A report made of what the first pass knows."""
    return PairReport(
        a=pair.a.key,
        b=pair.b.key,
        client_request_ids=(pair.a.client_request_id, pair.b.client_request_id),
        matched_by=pair.matched_by,
        verdict=Verdict.IDENTICAL if undecided is None else Verdict.INCONCLUSIVE,
        finish_reasons=(pair.a.finish_reason, pair.b.finish_reason),
        num_prompt_tokens=(pair.a.num_prompt, pair.b.num_prompt),
        num_output_tokens=(pair.a.num_output, pair.b.num_output),
        outputs_agree_for=pair.a.num_output if undecided is None else None,
        undecided=undecided,
    )


def _batches(pairs: list[Pair], tokens_per_batch: int) -> Iterator[list[Pair]]:
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        tokens = pair.a.num_tokens + pair.b.num_tokens
        if batch and size + tokens > tokens_per_batch:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += tokens
    if batch:
        yield batch


def manifest_diff(a: Mapping[str, Any], b: Mapping[str, Any], ignored: Collection[str]) -> list[dict[str, Any]]:
    """What two manifests say differently, as ``{"key": "config.core.dtype", "a": …, "b": …}``, sorted by key.

    `ignored` keys, and everything under them, differ between any two runs and say nothing.
    """
    flat_a, flat_b = dict(_flat("", a)), dict(_flat("", b))
    return [
        {"key": key, "a": flat_a.get(key), "b": flat_b.get(key)}
        for key in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(key) != flat_b.get(key) and not any(key == i or key.startswith(i + ".") for i in ignored)
    ]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value
