"""Aligns two token sequences: the shortest edit script, within a bound on work and memory.

Knows ids only. One inserted token is one insertion, whatever follows it.
Source: E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986), the greedy forward form.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["MAX_EDITS", "Alignment", "Hunk", "align", "common_prefix"]

MAX_EDITS = 256  # the search keeps (MAX_EDITS + 1) ** 2 integers at most: half a megabyte


@dataclass(frozen=True, slots=True)
class Hunk:
    """``a[a_start:a_end]`` became ``b[b_start:b_end]``; one of the two may be empty, not both."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int

    @property
    def kind(self) -> Literal["inserted", "deleted", "replaced"]:
        if self.a_start == self.a_end:
            return "inserted"
        return "deleted" if self.b_start == self.b_end else "replaced"


@dataclass(frozen=True, slots=True)
class Alignment:
    """The hunks in order. `complete` is False where the bound was met: the last hunk then holds all the rest."""

    hunks: tuple[Hunk, ...]
    complete: bool

    @property
    def num_inserted(self) -> int:
        return sum(hunk.b_end - hunk.b_start for hunk in self.hunks)

    @property
    def num_deleted(self) -> int:
        return sum(hunk.a_end - hunk.a_start for hunk in self.hunks)


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading elements are equal."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n  # a[:low] == b[:low] and a[:high] != b[:high]: slices compare at C speed
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def align(a: Sequence[object], b: Sequence[object], max_edits: int = MAX_EDITS) -> Alignment:
    """The edit script from `a` to `b`: minimal if it needs at most `max_edits` insertions and deletions.

    Beyond that, everything from the first difference to the common tail is one hunk.
    """
    start = common_prefix(a, b)
    a_end, b_end = len(a), len(b)
    while a_end > start and b_end > start and a[a_end - 1] == b[b_end - 1]:
        a_end -= 1
        b_end -= 1
    if start == a_end and start == b_end:
        return Alignment((), complete=True)
    rest = Hunk(start, a_end, start, b_end)
    if start in (a_end, b_end):
        return Alignment((rest,), complete=True)
    matches = _matches(a[start:a_end], b[start:b_end], max_edits)
    if matches is None:
        return Alignment((rest,), complete=False)
    return Alignment(_hunks(matches, rest), complete=True)


def _matches(a: Sequence[object], b: Sequence[object], max_edits: int) -> list[tuple[int, int]] | None:
    """Pairs of equal positions in order, or None where more than `max_edits` edits are needed.

    Diagonal k = x - y; furthest[k] is the furthest x reached on it with d edits. The state before each d is kept,
    cut to its 2d + 1 diagonals, to walk back.
    """
    n, m = len(a), len(b)
    offset = max_edits + 1
    furthest = array("l", [0]) * (2 * max_edits + 3)
    history: list[array[int]] = []
    for d in range(min(max_edits, n + m) + 1):
        history.append(furthest[offset - d - 1 : offset + d + 2])
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and furthest[offset + k - 1] < furthest[offset + k + 1])
            x = furthest[offset + k + 1] if down else furthest[offset + k - 1] + 1
            y = x - k
            while x < n and y < m and a[x] == b[y]:
                x += 1
                y += 1
            furthest[offset + k] = x
            if x >= n and y >= m:
                return _walk_back(history, n, m)
    return None


def _walk_back(history: list[array[int]], x: int, y: int) -> list[tuple[int, int]]:
    matches: list[tuple[int, int]] = []
    for d in range(len(history) - 1, -1, -1):
        row, center = history[d], d + 1
        k = x - y
        down = k == -d or (k != d and row[center + k - 1] < row[center + k + 1])
        previous_k = k + 1 if down else k - 1
        previous_x = row[center + previous_k] if d else 0
        previous_y = previous_x - previous_k if d else 0
        while x > previous_x and y > previous_y:
            x -= 1
            y -= 1
            matches.append((x, y))
        x, y = previous_x, previous_y
    matches.reverse()
    return matches


def _hunks(matches: list[tuple[int, int]], rest: Hunk) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    x, y = rest.a_start, rest.b_start
    for match_x, match_y in matches:
        next_x, next_y = rest.a_start + match_x, rest.b_start + match_y
        if next_x > x or next_y > y:
            hunks.append(Hunk(x, next_x, y, next_y))
        x, y = next_x + 1, next_y + 1
    if x < rest.a_end or y < rest.b_end:
        hunks.append(Hunk(x, rest.a_end, y, rest.b_end))
    return tuple(hunks)
