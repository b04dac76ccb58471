"""Draws one request: its stages as a waterfall, then its tokens, each with what the engine was doing.

From an `inferdbg.show-request/1` document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferdbg.cli.render.terminal import count, duration, table
from inferdbg.cli.render.token_cells import (
    COLUMNS,
    DOING,
    RIGHT,
    brief_cells,
    fitting_columns,
    full_cells,
    left_out,
    quoted,
    total_width,
)  # fmt: skip
from inferdbg.probes.text import shortened

__all__ = ["render_request"]

WATERFALL_WIDTH = 50
PROMPT_TOKENS = 8  # shown from each end
EXECUTE_STAGES = ("prefill", "decode")


def render_request(console: Console, document: Mapping[str, Any], limit: int) -> None:
    """Prints the document: of a long output the first and last tokens, `limit` in all (0: every one)."""
    _head(console, document)
    console.print()
    _waterfall(console, document["stages"])
    console.print()
    if document["num_prompt_tokens"] is not None:  # it was accepted
        _prompt(console, document, limit)
        console.print()
    _tokens(console, document, limit)
    for warning in document["warnings"]:
        console.print(Text.assemble(("warning: ", "bold yellow"), shortened(warning, 300)))


def _head(console: Console, document: Mapping[str, Any]) -> None:
    sampling = document["sampling"] or {}
    told = [f"{name} {sampling[name]}" for name in _SAMPLING if sampling.get(name) not in (None, *_SAMPLING[name])]
    end = document["end"] or _in_flight(document)
    reasons = [document["finish_reason"], document["stop_matched"], document["error_type"], document["error"]]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in (
        ("request", document["request_id"]),
        ("client's id", document["client_request_id"]),
        ("replay of", document["replay_of"]),
        ("trace", document["trace_id"]),
        ("served by", ", ".join(f"{name}{document[key]}" for name, key in _SERVED_BY if document[key] is not None)),
        ("ended", ", ".join([end, *(str(reason) for reason in reasons if reason)])),
        ("sampling", ", ".join(told)),
        ("tokens", _sizes(document)),
        ("asked", document["prompt_text"] or document["messages"]),
        ("answered", document["output_text"]),
        ("preempted", f"{count(document['num_preemptions'] or 0, 'time')}" if document["num_preemptions"] else None),
        ("others", _others(document)),
    ):
        if value:
            grid.add_row(name, Text(shortened(value, 300)))
    console.print(grid)


def _in_flight(document: Mapping[str, Any]) -> str:
    """What a request without an end has come to, as far as the engine's steps say."""
    known = count(document["num_output_tokens"] or 0, "output token")
    if document["run_status"] == "open":
        return f"not yet: in flight, {known} so far"
    return f"never: in flight when the run ended, {known} recovered from the engine's steps"


def _sizes(document: Mapping[str, Any]) -> str:
    prompt, cached = document["num_prompt_tokens"], document["cached_tokens"]
    from_cache = f" ({cached:,} from the prefix cache)" if cached else ""
    return f"{prompt or 0:,} prompt{from_cache}, {document['num_output_tokens'] or 0:,} output"


def _others(document: Mapping[str, Any]) -> str | None:
    others = len(document["places"]) - 1
    if not others:
        return None
    here = f"prompt {document['prompt_index']}, choice {document['choice_index']}"
    return f"this is {here}; {count(others, 'more row')} with --prompt and --choice"


_SERVED_BY = (("", "endpoint"), ("model ", "model"), ("replica ", "replica"))
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (), "seed": (), "max_tokens": (), "min_tokens": (0,), "n": (1,), "top_p": (1.0,), "top_k": (0, -1),
    "min_p": (0.0,), "repetition_penalty": (1.0,), "presence_penalty": (0.0,), "frequency_penalty": (0.0,),
}  # fmt: skip
"""What is worth a word, and the values that go without saying."""


def _waterfall(console: Console, stages: Sequence[Mapping[str, Any]]) -> None:
    if not stages:
        console.print("its stages are not known: they are written when a request ends")
        return
    width = max(10, min(WATERFALL_WIDTH, console.width - 36))
    begun, ended = stages[0]["start_ns"], stages[-1]["end_ns"]
    whole = max(1, ended - begun)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        grid.add_column(no_wrap=True, justify=justify)
    grid.add_row(Text("stage", style="bold"), Text("at", style="bold"), Text("took", style="bold"), "")
    for stage in stages:
        start, took = stage["start_ns"] - begun, stage["end_ns"] - stage["start_ns"]
        left = min(width - 1, start * width // whole)
        length = max(1, min(width - left, round(took * width / whole)))
        style = "cyan" if stage["name"] in EXECUTE_STAGES else "blue"
        line = Text(" " * left).append("█" * length if took else "▏", style=style)
        grid.add_row(Text(stage["name"]), duration(start / 1e9), duration(took / 1e9), line)
    grid.add_row(Text("end to end", style="bold"), "", Text(duration(whole / 1e9), style="bold"), "")
    console.print(grid)


def _prompt(console: Console, document: Mapping[str, Any], limit: int) -> None:
    """The prompt's first and last tokens, or all of them where `limit` is 0: id and piece."""
    cached, ids, pieces = document["cached_tokens"], document["prompt_token_ids"], document["prompt_pieces"]
    told = count(document["num_prompt_tokens"], "token") + (f", {cached:,} from the prefix cache" if cached else "")
    is_hashed = document["token_log"] == "hashed"
    if ids is None or is_hashed:
        told += ", which were logged as keyed hashes" if is_hashed else ", whose ids were not logged"
    console.print(Text.assemble(("prompt", "bold"), f"   {told}"))
    if ids is None or is_hashed:
        return
    words = [
        f"{token} {quoted(pieces[position] if pieces else None)}"
        for position, token in enumerate(ids)
        if not limit or position < PROMPT_TOKENS or position >= len(ids) - PROMPT_TOKENS
    ]
    if len(words) < len(ids):
        words.insert(PROMPT_TOKENS, f"… {len(ids) - len(words):,} left out (--limit 0 shows all) …")
    for line in _lines(words, console.width - 2):
        console.print(Text(f"  {line}"))


def _lines(words: Iterable[str], width: int) -> Iterator[str]:
    """The words in lines; one with blanks in it stays whole."""
    line = ""
    for word in words:
        if line and cell_len(line) + cell_len(word) + 3 > width:
            yield line
            line = word
        else:
            line = f"{line}   {word}" if line else word
    yield line


def _tokens(console: Console, document: Mapping[str, Any], limit: int) -> None:
    tokens: Sequence[Mapping[str, Any]] = document["tokens"]
    if not tokens:
        console.print("no token was sampled")
        return
    head, tail = (len(tokens), 0) if not limit or len(tokens) <= limit else ((limit + 1) // 2, limit // 2)
    shown = [*range(head), *range(len(tokens) - tail, len(tokens))]
    is_cut = len(shown) < len(tokens)

    def cells(brief: bool) -> list[dict[str, str]]:
        make = brief_cells if brief else full_cells
        rows = [make(tokens[i], tokens[i - 1]["time_ns"] if i else None) for i in shown]
        return [*rows[:head], left_out(len(tokens) - len(shown), brief), *rows[head:]] if is_cut else rows

    rows, names, is_brief = cells(brief=False), [*COLUMNS, DOING], False
    if total_width(rows, names) > console.width:
        rows, is_brief = cells(brief=True), True
        names = fitting_columns(rows, console.width)
    drawn = table(*names, right=RIGHT)
    for row in rows:
        drawn.add_row(*(Text(row.get(name, "")) for name in names))
    console.print(drawn)
    if is_cut and is_brief:
        console.print("--limit 0 shows all tokens")
