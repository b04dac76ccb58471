"""The `diff-tokens --json` document, `inferdbg.diff-tokens/1`. Its field names are a promise to scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferdbg.probes.diff_tokens.align import Alignment
from inferdbg.probes.diff_tokens.compare import MAX_HUNKS, Difference, PairReport, TokenAt, Undecided, Verdict
from inferdbg.probes.diff_tokens.report import RunDiff
from inferdbg.probes.diff_tokens.rows import RowKey, RowSummary, Token
from inferdbg.probes.text import valid_unicode
from inferdbg.probes.vocabulary import Vocabulary

__all__ = ["SCHEMA", "Decoder", "diff_document"]

SCHEMA = "inferdbg.diff-tokens/1"
_WOULD_DECIDE = {
    Undecided.UNFINISHED: "send these requests again and let them end, or compare again once they have",
    Undecided.NO_IDS: "record both runs with --token-log ids (or hashed, with one key), and with no step dropped",
    Undecided.DELETED: "record with a larger --retain: their rows were deleted while they were compared",
}
_NO_PAIR = "no request of one run has a partner in the other: send both the same requests, with the same x-request-id"


@dataclass(frozen=True, slots=True)
class Decoder:
    """Turns the ids of one run into text; None where the run has no tokenizer, or hashes instead of ids."""

    vocabulary: Vocabulary | None

    def piece(self, token: Token) -> str | None:
        return None if self.vocabulary is None else self.vocabulary.piece(token)

    def text(self, tokens: Sequence[Token]) -> str | None:
        return None if self.vocabulary is None else self.vocabulary.text(tokens)


def diff_document(
    diff: RunDiff,
    a: str,
    b: str,
    manifest_diff: list[dict[str, Any]],
    decoder_a: Decoder,
    decoder_b: Decoder,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything `diff` says, in plain values. Text that is no UTF-8 is given with U+FFFD; the ids beside it are exact.

    `enrichment` is null: what the engine was doing at the differences is not examined.
    """
    return {
        "schema": SCHEMA,
        "runs": {"a": a, "b": b},
        "verdict": diff.verdict.value,
        "num_pairs": len(diff.pairs),
        "counts": {verdict.value: diff.counts.get(verdict, 0) for verdict in Verdict},
        "unmatched": {"a": [_row(row) for row in diff.unmatched_a], "b": [_row(row) for row in diff.unmatched_b]},
        "undecided": _undecided(diff),
        "hashed": diff.hashed,
        "pairs": [_pair(report, decoder_a, decoder_b) for report in diff.pairs],
        "manifest_diff": manifest_diff,
        "enrichment": None,
        "warnings": list(warnings),
    }


def _undecided(diff: RunDiff) -> list[dict[str, Any]]:
    """Why the comparison is inconclusive, how many pairs of it, and what would decide them."""
    if not diff.pairs:
        return [{"reason": "no_pair", "num_pairs": 0, "would_decide": _NO_PAIR}]
    return [
        {"reason": reason.value, "num_pairs": number, "would_decide": _WOULD_DECIDE[reason]}
        for reason, number in sorted(diff.undecided.items())
    ]


def _row(row: RowSummary) -> dict[str, Any]:
    return {**_key(row.key), "client_request_id": row.client_request_id}


def _key(key: RowKey) -> dict[str, Any]:
    return {"request_id": key.request_id, "prompt_index": key.prompt_index, "choice_index": key.choice_index}


def _pair(report: PairReport, decoder_a: Decoder, decoder_b: Decoder) -> dict[str, Any]:
    difference = report.difference
    return {
        "request_a": report.a.request_id,
        "request_b": report.b.request_id,
        "prompt_index": report.a.prompt_index,
        "choice_index": report.a.choice_index,
        "verdict": report.verdict.value,
        "class": report.kind,
        "first_difference": _first(difference, decoder_a, decoder_b) if difference else None,
        "evidence": {
            "matched_by": report.matched_by,
            "client_request_ids": dict(zip("ab", report.client_request_ids, strict=True)),
            "finish_reasons": dict(zip("ab", report.finish_reasons, strict=True)),
            "prompt_tokens": dict(zip("ab", report.num_prompt_tokens, strict=True)),
            "output_tokens": dict(zip("ab", report.num_output_tokens, strict=True)),
            "output_tokens_before_difference": report.outputs_agree_for,
            "undecided": report.undecided.value if report.undecided else None,
            "sampling_changes": {
                name: dict(zip("ab", values, strict=True)) for name, values in (report.sampling_changes or {}).items()
            },
            "context": _context(difference, decoder_a, decoder_b) if difference else None,
            "alignment": _alignment(difference.alignment) if difference and difference.alignment else None,
        },
    }


def _first(difference: Difference, decoder_a: Decoder, decoder_b: Decoder) -> dict[str, Any]:
    return {
        "side": difference.side.value,
        "index": difference.index,
        "a": _token(difference.a, decoder_a),
        "b": _token(difference.b, decoder_b),
    }


def _token(token: TokenAt | None, decoder: Decoder) -> dict[str, Any] | None:
    if token is None:
        return None
    return {"id": token.id, "piece": valid_unicode(decoder.piece(token.id)), "logprob": token.logprob}


def _context(difference: Difference, decoder_a: Decoder, decoder_b: Decoder) -> dict[str, Any]:
    return {
        "before": valid_unicode(decoder_a.text(difference.before)),
        "after_a": valid_unicode(decoder_a.text(difference.after_a)),
        "after_b": valid_unicode(decoder_b.text(difference.after_b)),
    }


def _alignment(alignment: Alignment) -> dict[str, Any]:
    return {
        "inserted": alignment.num_inserted,
        "deleted": alignment.num_deleted,
        "complete": alignment.complete,
        "num_hunks": len(alignment.hunks),
        "hunks": [
            {"kind": hunk.kind, "a": [hunk.a_start, hunk.a_end], "b": [hunk.b_start, hunk.b_end]}
            for hunk in alignment.hunks[:MAX_HUNKS]
        ],
    }
