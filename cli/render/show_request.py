"""Draws one request: its stages as a waterfall, then its tokens, each with what the engine was doing.

From an `inferdbg.show-request/1` document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferdbg.cli.render.terminal import count, duration, table
from inferdbg.probes.text import shortened

__all__ = ["render_request"]

WATERFALL_WIDTH = 50
PIECE_WIDTH = 24
EXECUTE_STAGES = ("prefill", "decode")


def render_request(console: Console, document: Mapping[str, Any], limit: int) -> None:
    """Prints the document: of a long output the first and last tokens, `limit` in all (0: every one)."""
    _head(console, document)
    console.print()
    _waterfall(console, document["stages"])
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
    begun, ended = stages[0]["start_ns"], stages[-1]["end_ns"]
    whole = max(1, ended - begun)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        grid.add_column(no_wrap=True, justify=justify)
    grid.add_row(Text("stage", style="bold"), Text("at", style="bold"), Text("took", style="bold"), "")
    for stage in stages:
        start, took = stage["start_ns"] - begun, stage["end_ns"] - stage["start_ns"]
        left = min(WATERFALL_WIDTH - 1, start * WATERFALL_WIDTH // whole)
        length = max(1, min(WATERFALL_WIDTH - left, round(took * WATERFALL_WIDTH / whole)))
        style = "cyan" if stage["name"] in EXECUTE_STAGES else "blue"
        line = Text(" " * left).append("█" * length if took else "▏", style=style)
        grid.add_row(Text(stage["name"]), duration(start / 1e9), duration(took / 1e9), line)
    grid.add_row(Text("end to end", style="bold"), "", Text(duration(whole / 1e9), style="bold"), "")
    console.print(grid)


def _tokens(console: Console, document: Mapping[str, Any], limit: int) -> None:
    tokens: Sequence[Mapping[str, Any]] = document["tokens"]
    if not tokens:
        console.print("no token was sampled")
        return
    rows = table(
        "#", "id", "piece", "logprob", "at", "gap", "step", "batch", "cached", "what the engine was doing",
        right=("#", "id", "logprob", "at", "gap", "step", "batch", "cached"),
    )  # fmt: skip
    rows.columns[-1].no_wrap, rows.columns[-1].overflow = False, "fold"
    head, tail = (len(tokens), 0) if not limit or len(tokens) <= limit else ((limit + 1) // 2, limit // 2)
    for position, token in enumerate(tokens):
        if head <= position < len(tokens) - tail:
            if position == head:
                rows.add_row("…", *[""] * 8, f"{len(tokens) - head - tail:,} tokens left out (--limit 0 shows all)")
            continue
        before = tokens[position - 1]["time_ns"] if position else None
        rows.add_row(*_token(token, before))
    console.print(rows)


def _token(token: Mapping[str, Any], before_ns: int | None) -> list[str | Text]:
    engine = token["engine"] or {}
    piece = token["piece"]
    time_ns, since = token["time_ns"], token["offset_seconds"]
    gap = duration((time_ns - before_ns) / 1e9) if before_ns is not None and time_ns is not None else ""
    return [
        str(token["index"]),
        "–" if token["id"] is None else shortened(str(token["id"]), 20),
        Text("–" if piece is None else f'"{shortened(piece, PIECE_WIDTH)}"'),  # quotes: spaces at the ends count
        "–" if token["logprob"] is None else f"{token['logprob']:.3f}",
        duration(since),
        gap,
        "–" if token["step"] is None else str(token["step"]),
        _number(engine.get("batch")),
        _number(engine.get("cached") or None),
        Text(_doing(engine)),
    ]


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _doing(engine: Mapping[str, Any]) -> str:
    """The step in words: ``decode with 12 others``, ``prefill 512:640 of 640``, ``preempted before``."""
    parts: list[str] = []
    for chunk in engine.get("chunks", ()):
        kind = "prefill" if chunk["prefill"] else "decode"
        parts.append(f"{kind} {chunk['start']}:{chunk['start'] + chunk['len']}" if chunk["prefill"] else kind)
    if prefills := engine.get("other_prefill_tokens"):
        parts.append(f"beside {prefills} prefill tokens")
    if engine.get("preempted"):
        parts.append(f"preempted before, {engine['lost']} tokens lost")
    return ", ".join(parts)
