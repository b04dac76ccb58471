"""The `diff-tokens --json` document, `inferdbg.diff-tokens/1`. Its field names are a promise to scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferdbg.probes.diff_tokens.align import Alignment
from inferdbg.probes.diff_tokens.compare import MAX_HUNKS, Difference, PairReport, TokenAt, Verdict
from inferdbg.probes.diff_tokens.report import RunDiff
from inferdbg.probes.diff_tokens.rows import RowKey, RowSummary, Token
from inferdbg.probes.text import valid_unicode
from inferdbg.probes.vocabulary import Vocabulary

__all__ = ["SCHEMA", "Decoder", "diff_document"]

SCHEMA = "inferdbg.diff-tokens/1"


@dataclass(frozen=True, slots=True)
class Decoder:
    """Turns the ids of one run into text; None where the run has no tokenizer, or hashes instead of ids."""

    vocabulary: Vocabulary | None

    def piece(self, token: Token) -> str | None:
        return None if self.vocabulary is None else self.vocabulary.piece(token)

    def text(self, tokens: Sequence[Token]) -> str | None:
        return None if self.vocabulary is None else self.vocabulary.text(tokens)


def diff_document(
    diff: RunDiff, a: str, b: str, manifest_diff: list[dict[str, Any]], decoder_a: Decoder, decoder_b: Decoder
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
        "hashed": diff.hashed,
        "pairs": [_pair(report, decoder_a, decoder_b) for report in diff.pairs],
        "manifest_diff": manifest_diff,
        "enrichment": None,
    }


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
        "class": difference.kind if difference else None,
        "first_difference": _first(difference, decoder_a, decoder_b) if difference else None,
        "evidence": {
            "matched_by": report.matched_by,
            "client_request_ids": dict(zip("ab", report.client_request_ids, strict=True)),
            "finish_reasons": dict(zip("ab", report.finish_reasons, strict=True)),
            "prompt_tokens": dict(zip("ab", report.num_prompt_tokens, strict=True)),
            "output_tokens": dict(zip("ab", report.num_output_tokens, strict=True)),
            "output_tokens_before_difference": report.outputs_agree_for,
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
