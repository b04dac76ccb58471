"""Compares one pair of rows: is anything different, where first, and what is different after realigning.

Knows ids, logprobs and sampling parameters. It states differences; whether one is noise or a fault it does not judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from inferdbg.probes.diff_tokens.align import Alignment, align, common_prefix
from inferdbg.probes.diff_tokens.rows import RowKey, Token, TokenRow, is_whole

__all__ = ["Difference", "PairReport", "Side", "TokenAt", "Undecided", "Verdict", "compare_rows", "is_cut_off"]

CONTEXT_TOKENS = 12  # shown before and after the first difference
MAX_HUNKS = 20  # kept per report


class Verdict(StrEnum):
    """What is true of a pair. `INPUT_DIFFERS` outranks the others: different prompts explain different outputs."""

    IDENTICAL = "identical"
    INPUT_DIFFERS = "input_differs"
    SAMPLING_DIFFERS = "sampling_differs"  # same prompt, other sampling parameters, other output
    OUTPUT_DIFFERS = "output_differs"  # same prompt, same sampling, other output: why is not established
    INCONCLUSIVE = "inconclusive"  # nothing differs as far as can be told, and not all can be told: see `Undecided`


class Undecided(StrEnum):
    """What a pair lacks to be decided."""

    UNFINISHED = "unfinished"  # an output was cut off (in flight, aborted, failed) before it could differ
    NO_IDS = "no_ids"  # one of the two has none: they were not logged, or some were lost with step records
    DELETED = "deleted"  # its row went between two readings: retention took the segment


class Side(StrEnum):
    """Where a difference is."""

    PROMPT = "prompt"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class TokenAt:
    """A token at the first difference. `logprob` is its own run's; None where there is none."""

    id: Token
    logprob: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first index at which the two differ, and what stands around it. None: that side has ended there."""

    side: Side
    index: int
    a: TokenAt | None
    b: TokenAt | None
    before: tuple[Token, ...]  # the same in both
    after_a: tuple[Token, ...]  # from `index` on
    after_b: tuple[Token, ...]
    alignment: Alignment | None  # None: hashed ids, which cannot be realigned

    @property
    def kind(self) -> str:
        """The shape of the whole difference; a seam, not a cause."""
        if self.a is None or self.b is None:
            return "cut_short"
        if self.alignment is None:
            return "diverged"
        kinds = {hunk.kind for hunk in self.alignment.hunks}
        if not self.alignment.complete or "replaced" in kinds or len(kinds) > 1:
            return "replaced" if len(self.alignment.hunks) == 1 else "rewritten"
        return kinds.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """One pair, compared."""

    a: RowKey
    b: RowKey
    client_request_ids: tuple[str | None, str | None]
    matched_by: str
    verdict: Verdict
    difference: Difference | None = None
    sampling_changes: dict[str, tuple[Any, Any]] | None = None
    finish_reasons: tuple[str | None, str | None] = (None, None)
    num_prompt_tokens: tuple[int, int] = (0, 0)
    num_output_tokens: tuple[int, int] = (0, 0)
    outputs_agree_for: int | None = None  # output tokens before the first different one
    undecided: Undecided | None = None  # set where the verdict is `INCONCLUSIVE`

    @property
    def kind(self) -> str | None:
        """The class of the pair: the shape of its difference."""
        if self.difference is not None:
            return self.difference.kind
        return "cut_short" if self.undecided is Undecided.UNFINISHED else None


def compare_rows(a: TokenRow, b: TokenRow, matched_by: str, *, hashed: bool = False) -> PairReport:
    """Compares prompts, then outputs. `hashed` rows hold chained hashes: after the first difference all differ."""
    changes = _sampling_changes(a.sampling, b.sampling)
    verdict, difference, agree, undecided = Verdict.IDENTICAL, None, None, None
    if a.output is not None and b.output is not None:
        agree = common_prefix(a.output, b.output)
    if a.prompt is not None and b.prompt is not None and a.prompt != b.prompt:
        verdict = Verdict.INPUT_DIFFERS  # whatever is known of the outputs
        difference = _difference(Side.PROMPT, a.prompt, b.prompt, [], [], hashed)
    elif a.prompt is None or b.prompt is None or a.output is None or b.output is None or agree is None:
        verdict, undecided = Verdict.INCONCLUSIVE, Undecided.NO_IDS
    else:
        if a.output != b.output:
            verdict = Verdict.SAMPLING_DIFFERS if changes else Verdict.OUTPUT_DIFFERS
            difference = _difference(Side.OUTPUT, a.output, b.output, a.logprobs, b.logprobs, hashed, a.prompt)
        if is_cut_off(agree, (len(a.output), a.finish_reason), (len(b.output), b.finish_reason)):
            verdict, undecided = Verdict.INCONCLUSIVE, Undecided.UNFINISHED
    return PairReport(
        a=a.key,
        b=b.key,
        client_request_ids=(a.client_request_id, b.client_request_id),
        matched_by=matched_by,
        verdict=verdict,
        difference=difference,
        sampling_changes=changes or None,
        finish_reasons=(a.finish_reason, b.finish_reason),
        num_prompt_tokens=(len(a.prompt or ()), len(b.prompt or ())),
        num_output_tokens=(len(a.output or ()), len(b.output or ())),
        outputs_agree_for=agree,
        undecided=undecided,
    )


def is_cut_off(agree: int, a: tuple[int, str | None], b: tuple[int, str | None]) -> bool:
    """Whether outputs `a` and `b`, each a length and a finish reason, agree for `agree` tokens and no further only
    because one was cut off there: it might have gone on as the other did, or not. Two that were cut off at the same
    token are the same, unless they have none.
    """
    a_cut, b_cut = (length == agree and not is_whole(reason) for length, reason in (a, b))
    return agree == 0 if a_cut and b_cut else a_cut or b_cut


def _difference(
    side: Side,
    a: list[Token],
    b: list[Token],
    logprobs_a: list[float],
    logprobs_b: list[float],
    hashed: bool,
    lead: list[Token] | None = None,
) -> Difference:
    index = common_prefix(a, b)
    before = a[max(0, index - CONTEXT_TOKENS) : index]
    if lead and len(before) < CONTEXT_TOKENS:
        before = lead[len(before) - CONTEXT_TOKENS :] + before
    alignment = None if hashed else align(a, b)
    return Difference(
        side=side,
        index=index,
        a=_token_at(a, logprobs_a, index),
        b=_token_at(b, logprobs_b, index),
        before=tuple(before),
        after_a=tuple(a[index : index + CONTEXT_TOKENS]),
        after_b=tuple(b[index : index + CONTEXT_TOKENS]),
        alignment=alignment,
    )


def _token_at(tokens: list[Token], logprobs: list[float], index: int) -> TokenAt | None:
    if index >= len(tokens):
        return None
    return TokenAt(tokens[index], logprobs[index] if index < len(logprobs) else None)


def _sampling_changes(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    if a is None or b is None:
        return {}
    names = sorted(a.keys() | b.keys())
    changes = {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}
    if a.get("temperature") == b.get("temperature") == 0:
        changes.pop("seed", None)  # drawn for every request, and unused by greedy sampling
    return changes
