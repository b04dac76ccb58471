"""The cells of a request's token table, at length and in brief, and which of its columns fit a line.

Knows no console.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from inferdbg.cli.render.terminal import duration
from inferdbg.probes.text import shortened

__all__ = [
    "COLUMNS",
    "DOING",
    "RIGHT",
    "brief_cells",
    "fitting_columns",
    "full_cells",
    "left_out",
    "quoted",
    "total_width",
]

DOING, DOING_IN_BRIEF = "what the engine was doing", "engine"
COLUMNS = ("#", "id", "piece", "logprob", "at", "gap", "step", "batch", "cached")
RIGHT = ("#", "id", "logprob", "at", "gap", "step", "batch", "cached")
COLUMN_GAP = 3
PIECE_WIDTH, BRIEF_PIECE_WIDTH = 24, 12
_FIRST_TO_GO = ("cached", "batch", "gap", "step")


def total_width(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> int:
    """How wide a table of these columns is."""
    widths = [max(map(cell_len, [name, *(row.get(name, "") for row in rows)])) for name in names]
    return sum(widths) + COLUMN_GAP * (len(widths) - 1)


def fitting_columns(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Of brief rows the columns that fit `width`, in order; what says least has gone first."""
    names = [*COLUMNS, DOING_IN_BRIEF]
    for name in _FIRST_TO_GO:
        if total_width(rows, names) <= width:
            break
        names.remove(name)
    return names


def full_cells(token: Mapping[str, Any], before_ns: int | None) -> dict[str, str]:
    """The cells of one token by column; `before_ns` is when the one before it reached the front."""
    return _cells(token, before_ns) | {"piece": quoted(token["piece"]), DOING: _doing(token["engine"] or {})}


def brief_cells(token: Mapping[str, Any], before_ns: int | None) -> dict[str, str]:
    """The same for short lines."""
    piece, doing = quoted(token["piece"], BRIEF_PIECE_WIDTH), _doing_in_brief(token["engine"] or {})
    return _cells(token, before_ns) | {"piece": piece, DOING_IN_BRIEF: doing}


def left_out(number: int, brief: bool) -> dict[str, str]:
    """The row that stands for `number` tokens."""
    if brief:
        return {"#": "…", DOING_IN_BRIEF: f"{number:,} left out"}
    return {"#": "…", DOING: f"{number:,} tokens left out (--limit 0 shows all)"}


def quoted(piece: str | None, limit: int = PIECE_WIDTH) -> str:
    """A piece in quotes, since blanks at its ends count."""
    return "–" if piece is None else f'"{shortened(piece, limit)}"'


def _cells(token: Mapping[str, Any], before_ns: int | None) -> dict[str, str]:
    engine, time_ns = token["engine"] or {}, token["time_ns"]
    gap = duration((time_ns - before_ns) / 1e9) if before_ns is not None and time_ns is not None else ""
    return {
        "#": str(token["index"]),
        "id": "–" if token["id"] is None else shortened(str(token["id"]), 20),
        "logprob": "–" if token["logprob"] is None else f"{token['logprob']:.3f}",
        "at": duration(token["offset_seconds"]),
        "gap": gap,
        "step": "–" if token["step"] is None else str(token["step"]),
        "batch": _number(engine.get("batch")),
        "cached": _number(engine.get("cached") or None),
    }


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _doing(engine: Mapping[str, Any]) -> str:
    """The step in words: ``decode, beside 142 prefill tokens``, ``prefill 512:640``, ``preempted before, …``."""
    parts: list[str] = []
    for chunk in engine.get("chunks", ()):
        kind = "prefill" if chunk["prefill"] else "decode"
        parts.append(f"{kind} {chunk['start']}:{chunk['start'] + chunk['len']}" if chunk["prefill"] else kind)
    if prefills := engine.get("other_prefill_tokens"):
        parts.append(f"beside {prefills} prefill tokens")
    if engine.get("preempted"):
        parts.append(f"preempted before, {engine['lost']} tokens lost")
    return ", ".join(parts)


def _doing_in_brief(engine: Mapping[str, Any]) -> str:
    """The same in few: ``decode +142``, ``prefill 0:640 in 3``, ``preempted -9``."""
    chunks = engine.get("chunks", ())
    prefills = [chunk for chunk in chunks if chunk["prefill"]]
    parts = [f"preempted -{engine['lost']}"] if engine.get("preempted") else []
    if prefills:
        parts.append(f"prefill {prefills[0]['start']}:{prefills[-1]['start'] + prefills[-1]['len']}")
    if len(prefills) > 1:
        parts.append(f"in {len(prefills)}")
    if len(prefills) < len(chunks):
        parts.append("decode")
    if others := engine.get("other_prefill_tokens"):
        parts.append(f"+{others}")
    return " ".join(parts)
