"""Finds which request of one run answers which request of another. Knows names and digests, no tokens.

In this order: `replay_of`, the client's request id, the same prompt (the k-th of them with the k-th of the other).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from inferdbg.probes.diff_tokens.rows import RowSummary

__all__ = ["MatchedBy", "Matching", "Pair", "match"]

MatchedBy = Literal["replay_of", "client_request_id", "prompt"]
_Name = Callable[[RowSummary], Hashable | None]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rows that answer the same request."""

    a: RowSummary
    b: RowSummary
    matched_by: MatchedBy


@dataclass(frozen=True, slots=True)
class Matching:
    """Every row of both runs is in exactly one of the three. In order of arrival in run A (or B)."""

    pairs: list[Pair]
    unmatched_a: list[RowSummary]
    unmatched_b: list[RowSummary]


def _place(row: RowSummary) -> tuple[int, int]:
    return (row.key.prompt_index, row.key.choice_index)


def _own(row: RowSummary) -> Hashable:
    return (row.key.request_id, _place(row))


def _replayed(row: RowSummary) -> Hashable | None:
    return None if row.replay_of is None else (row.replay_of, _place(row))


def _client(row: RowSummary) -> Hashable | None:
    return None if row.client_request_id is None else (row.client_request_id, _place(row))


def _prompt(row: RowSummary) -> Hashable | None:
    return None if row.prompt_digest is None else (row.prompt_digest, row.key.choice_index)


_RULES: tuple[tuple[MatchedBy, _Name, _Name], ...] = (
    ("replay_of", _own, _replayed),  # B replays A
    ("replay_of", _replayed, _own),  # A replays B
    ("replay_of", _replayed, _replayed),  # both replay a third run
    ("client_request_id", _client, _client),
    ("prompt", _prompt, _prompt),
)


def match(rows_a: Iterable[RowSummary], rows_b: Iterable[RowSummary]) -> Matching:
    """Pairs the rows of two runs; each rule takes only what the rules before it left over."""
    left_a = sorted(rows_a, key=lambda row: (row.arrival_ns, row.key))
    left_b = sorted(rows_b, key=lambda row: (row.arrival_ns, row.key))
    order = {row.key: position for position, row in enumerate(left_a)}
    pairs: list[Pair] = []
    for matched_by, name_a, name_b in _RULES:
        waiting: defaultdict[Hashable, list[RowSummary]] = defaultdict(list)
        for row in reversed(left_b):  # reversed, so that pop() takes the earliest
            if (name := name_b(row)) is not None:
                waiting[name].append(row)
        taken_b: set[int] = set()
        rest_a: list[RowSummary] = []
        for row in left_a:
            name = name_a(row)
            candidates = waiting.get(name) if name is not None else None
            if candidates:
                other = candidates.pop()
                taken_b.add(id(other))
                pairs.append(Pair(row, other, matched_by))
            else:
                rest_a.append(row)
        left_a = rest_a
        left_b = [row for row in left_b if id(row) not in taken_b]
    pairs.sort(key=lambda pair: order[pair.a.key])
    return Matching(pairs, left_a, left_b)
