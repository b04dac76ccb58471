"""Draws a comparison of two token logs: the sum first, then each difference with its text and both logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferdbg.cli.render.terminal import count, table
from inferdbg.probes.text import printable, shortened

__all__ = ["render_diff"]

_HEADLINES = {
    "identical": ("identical", "green"),
    "input_differs": ("prompts differ", "red"),
    "output_differs": ("outputs differ", "yellow"),
    "sampling_differs": ("outputs differ, and so did the sampling parameters", "yellow"),
    "inconclusive": ("not decided", "magenta"),
}
_UNDECIDED = {
    "unfinished": "an output was cut off (in flight, aborted or failed) where it still agreed",
    "no_ids": "token ids were not logged, or some were lost",
    "deleted": "rows are gone",
    "no_pair": "there is nothing to compare",
}
MAX_VALUE = 48
MAX_BEFORE, MAX_AFTER = 37, 48  # columns of context
MAX_NAMES = 5


def render_diff(console: Console, document: dict[str, Any], limit: int) -> None:
    """Prints an `inferdbg.diff-tokens/1` document; at most `limit` differing pairs in full."""
    _head(console, document)
    _settings(console, document["manifest_diff"])
    different = [pair for pair in document["pairs"] if pair["verdict"] not in ("identical", "inconclusive")]
    for pair in different[:limit]:
        console.print()
        _pair(console, pair)
    if len(different) > limit:
        console.print()
        console.print(f"… and {count(len(different) - limit, 'more difference')} (--limit {len(different)} shows all)")
    _undecided(console, document)
    _unmatched(console, document["unmatched"])


def _head(console: Console, document: dict[str, Any]) -> None:
    words, style = _HEADLINES[document["verdict"]]
    only = [(side.upper(), len(rows)) for side, rows in document["unmatched"].items() if rows]
    if only and document["verdict"] == "identical":
        words, style = "identical where matched", "yellow"  # one request in common is no all-clear
    for side, name in document["runs"].items():
        console.print(Text.assemble((f"{side.upper()}  ", "bold"), printable(name)))
    pairs = document["pairs"]
    counts = document["counts"]
    console.print()
    console.print(
        Text.assemble(
            (words, f"bold {style}"),
            f"   {count(document['num_pairs'], 'pair')}",
            *_parts(counts),
            *((f", {number:,} only in {side}", "bold yellow") for side, number in only),
        )
    )
    firsts = sorted(
        pair["first_difference"]["index"] for pair in pairs if pair["verdict"] in ("output_differs", "sampling_differs")
    )
    if firsts:
        agree = sum(pair["evidence"]["output_tokens_before_difference"] or 0 for pair in pairs)
        total = sum(max(pair["evidence"]["output_tokens"].values()) for pair in pairs)
        console.print(
            f"first different output token: earliest {firsts[0]}, median {firsts[len(firsts) // 2]}, "
            f"latest {firsts[-1]}; "
            f"{agree:,} of {total:,} output tokens come before any difference"
        )
    if document["hashed"]:
        console.print("hashed token log: only the first difference of each request can be told")


def _parts(counts: dict[str, int]) -> Iterator[str]:
    for verdict, number in counts.items():
        if number:
            yield f", {number:,} {verdict.replace('_', ' ')}"


def _settings(console: Console, changes: list[dict[str, Any]]) -> None:
    if not changes:
        console.print("what the two runs say of themselves (model, settings, versions, machine) is the same")
        return
    console.print()
    rows = table("not the same to begin with", "A", "B")
    for change in changes:
        rows.add_row(*(Text(_value(change[key])) for key in ("key", "a", "b")))
    console.print(rows)


def _pair(console: Console, pair: dict[str, Any]) -> None:
    evidence, first = pair["evidence"], pair["first_difference"]
    where = f"{first['side']} token {first['index']}"
    console.print(Text.assemble((_name(pair), "bold"), f"   {pair['class'].replace('_', ' ')} from {where}"))
    console.print(_sides(console, first, evidence))
    for name, values in evidence["sampling_changes"].items():
        console.print(Text(f"  sampling.{printable(name)}: A {_value(values['a'])}, B {_value(values['b'])}"))
    alignment = evidence["alignment"]
    if alignment is not None:
        rest = "" if alignment["complete"] else " (too different to realign: the rest counts as replaced)"
        console.print(
            f"  realigned: {count(alignment['num_hunks'], 'difference')}, "
            f"{count(alignment['inserted'], 'token')} inserted, {alignment['deleted']:,} deleted{rest}"
        )


def _name(pair: dict[str, Any]) -> str:
    ids = pair["evidence"]["client_request_ids"]  # what a person called it says more than two drawn ids
    a, b = (ids["a"], ids["b"]) if ids["a"] and ids["a"] == ids["b"] else (pair["request_a"], pair["request_b"])
    names = printable(a) if a == b else f"{printable(a)} / {printable(b)}"
    return names + "".join(
        f" {word} {pair[key]}" for word, key in (("prompt", "prompt_index"), ("choice", "choice_index")) if pair[key]
    )


def _sides(console: Console, first: dict[str, Any], evidence: dict[str, Any]) -> Table:
    """Both tokens with the text around them; where the line is too short, it is the text that is cut."""
    figures = {side: (f"  {side.upper()}", *_figures(first[side])) for side in ("a", "b")}
    grid = Table.grid(padding=(0, 1))
    for cells in zip(*figures.values(), strict=True):
        grid.add_column(no_wrap=True, min_width=max(map(len, cells)))
    grid.add_column(no_wrap=True, overflow="ellipsis")
    room = console.width - sum(column.min_width or 0 for column in grid.columns) - 2 * len(grid.columns)
    for side, style in (("a", "red"), ("b", "green")):
        if first[side] is None:
            ended = evidence["finish_reasons"][side]
            reason = f" ({shortened(ended, 20)})" if first["side"] == "output" and ended else ""
            told: Text | str = Text(f"ended here{reason}", style="dim")
        else:
            context = evidence["context"]
            told = _around(console, context["before"], first[side]["piece"], context[f"after_{side}"], style, room)
        grid.add_row(*figures[side], told)
    return grid


def _figures(token: dict[str, Any] | None) -> tuple[str, str]:
    """Id and logprob, whole at any width."""
    if token is None:
        return ("", "")
    return (str(token["id"]), "" if token["logprob"] is None else f"{token['logprob']:.3f}")


def _around(
    console: Console, before: str | None, piece: str | None, after: str | None, style: str, room: int
) -> Text | str:
    """The token, marked, in the text around it: at most `room` columns, of which the token comes first."""
    if before is None or piece is None or after is None:
        return ""
    marks = ("▸", "◂") if console.color_system is None or console.no_color else ("", "")
    told = shortened(piece, max(1, room - 2 * len(marks[0])))
    token = Text.assemble(marks[0], (told, f"bold underline {style}"), marks[1])
    room = max(0, room - token.cell_len)
    rest = after[len(piece) :] if after.startswith(piece) else ""
    start = _tail(before, min(MAX_BEFORE, room // 2))
    return Text.assemble((start, "dim"), token, _within(rest, min(MAX_AFTER, room - cell_len(start))))


def _tail(text: str, room: int) -> str:
    """An ellipsis and the end of the text, in at most `room` columns."""
    safe = printable(text[-room:]) if room > 1 else ""
    while safe and cell_len(safe) > room - 1:
        safe = safe[1:]
    return f"…{safe}" if safe else ""


def _within(text: str, room: int) -> str:
    """The beginning of the text in at most `room` columns."""
    limit = room
    while limit > 0 and cell_len(shortened(text, limit)) > room:
        limit -= 1
    return shortened(text, limit) if limit > 0 else ""


def _undecided(console: Console, document: dict[str, Any]) -> None:
    for reason in document["undecided"]:
        pairs = [pair for pair in document["pairs"] if pair["evidence"]["undecided"] == reason["reason"]]
        number = f"{count(len(pairs), 'pair')}: " if pairs else ""
        named = f" ({_some([_name(pair) for pair in pairs])})" if pairs else ""
        console.print()
        console.print(Text(f"not decided: {number}{_UNDECIDED[reason['reason']]}{named}"))
        console.print(Text(f"  what would decide: {reason['would_decide']}", style="dim"))


def _unmatched(console: Console, unmatched: dict[str, list[dict[str, Any]]]) -> None:
    for side, rows in unmatched.items():
        if rows:
            names = _some([shortened(row["request_id"], 40) for row in rows])
            console.print(Text(f"only in {side.upper()}: {count(len(rows), 'row')}: {names}"))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _value(value: Any) -> str:
    return "–" if value is None else shortened(value if isinstance(value, str) else repr(value), MAX_VALUE)
