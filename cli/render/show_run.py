"""Draws a run at a glance, from an `inferdbg.show/1` document. A person should have read it in ten seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferdbg.cli.render.terminal import bar, count, duration, share, table
from inferdbg.probes.text import shortened

__all__ = ["render_requests", "render_run"]

_STATUS_STYLES = {"open": "cyan", "closed": "green", "lost": "bold red"}
_END_STYLES = {"finished": "green", "aborted": "yellow", "rejected": "magenta", "failed": "red"}
MAX_IN_FLIGHT = 10
REQUESTS_PER_TABLE = 1000


def render_run(console: Console, document: Mapping[str, Any], argument: str) -> None:
    """Prints the document. `argument` names the run in a command line. Warnings come last, where the eye rests."""
    _head(console, document)
    console.print()
    _counts(console, document)
    console.print()
    _percentiles(console, document)
    _stages(console, document)
    _in_flight(console, document["in_flight_requests"])
    _slowest(console, document, argument)
    _losses(console, document)


def render_requests(console: Console, requests: Iterator[Mapping[str, Any]]) -> None:
    """Prints every request, one a line; a table at a time, so that a long run needs no memory for it."""
    shown = False
    while block := list(islice(requests, REQUESTS_PER_TABLE)):
        console.print(_requests(block, with_errors=True))
        shown = True
    if not shown:
        console.print("0 requests")


def _head(console: Console, document: Mapping[str, Any]) -> None:
    status = document["status"]
    grid = _pairs()
    seconds = document["duration_seconds"]
    grid.add_row(
        "run",
        Text.assemble(
            (shortened(document["run"], 60), "bold"),
            "   ",
            (status, _STATUS_STYLES.get(status, "")),
            f" after {duration(seconds)}" if seconds is not None else "",
            f" ({shortened(str(document['ended_because']), 60)})" if document["ended_because"] else "",
        ),
    )
    for name, value in document["about"].items():
        if value:
            grid.add_row(name, Text(shortened(value, 100)))
    console.print(grid)


def _counts(console: Console, document: Mapping[str, Any]) -> None:
    grid = _pairs()
    ends = Text(count(document["num_requests"], "request"))
    for end, number in document["ends"].items():
        ends.append(f"   {number:,} {shortened(end, 20)}", style=_END_STYLES.get(end, "") if number else "dim")
    in_flight = document["in_flight"]
    word = "in flight" if document["status"] == "open" else "in flight when it ended"
    ends.append(f"   {in_flight:,} {word}", style="bold red" if in_flight and document["status"] != "open" else "dim")
    grid.add_row("requests", ends)
    tokens = document["tokens"]
    told = f"{tokens['prompt']:,} prompt ({share(tokens['cached'], tokens['prompt'])} from the prefix cache)"
    grid.add_row("tokens", Text(f"{told}   {tokens['output']:,} output"))
    engine = [count(document["num_preemptions"], "preemption")]
    if document["restarts"]:
        engine.append(f"restarted {count(document['restarts'], 'time')}")
    grid.add_row("engine", Text("   ".join(engine)))
    if causes := document["causes"]:
        told = "   ".join(f"{number:,} {shortened(cause, 40)}" for cause, number in list(causes.items())[:6])
        grid.add_row("not finished", Text(told, style="yellow"))
    console.print(grid)


def _percentiles(console: Console, document: Mapping[str, Any]) -> None:
    rows = table("", "p50", "p95", "p99", right=("p50", "p95", "p99"))
    for label, key in (("TTFT", "ttft_seconds"), ("ITL", "itl_seconds"), ("E2E", "e2e_seconds")):
        values = document[key]
        rows.add_row(Text(label, style="bold"), *(duration(values[p]) for p in ("p50", "p95", "p99")))
    console.print(rows)
    console.print()


def _stages(console: Console, document: Mapping[str, Any]) -> None:
    whole = document["e2e_sum_seconds"]
    if not whole:
        return
    console.print(Text(f"where {duration(whole)} of request time went", style="bold"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        grid.add_column(no_wrap=True, justify=justify)
    for stage, seconds in document["stages_seconds"].items():
        grid.add_row(Text(f"  {stage}"), duration(seconds), share(seconds, whole), bar(seconds, whole))
    console.print(grid)


def _in_flight(console: Console, requests: Sequence[Mapping[str, Any]]) -> None:
    if not requests:
        return
    console.print()
    console.print(Text("in flight", style="bold"))
    rows = table("request", "client's id", "prompt", "output", right=("prompt", "output"))
    for request in requests[:MAX_IN_FLIGHT]:
        rows.add_row(
            Text(shortened(request["request_id"], 44)),
            Text(shortened(request["client_request_id"] or "–", 32)),
            f"{request['prompt_tokens']:,}",
            f"{request['output_tokens']:,}",
        )
    console.print(rows)
    if len(requests) > MAX_IN_FLIGHT:
        console.print(f"… and {len(requests) - MAX_IN_FLIGHT:,} more (--json has all)")


def _slowest(console: Console, document: Mapping[str, Any], argument: str) -> None:
    if not document["slowest"]:
        return
    console.print()
    # unbroken and whole, to be copied
    console.print(Text(f"slowest requests (inferdbg show {argument} REQUEST)", style="bold"), soft_wrap=True)
    console.print(_requests(document["slowest"]))


def _requests(requests: Sequence[Mapping[str, Any]], with_errors: bool = False) -> Table:
    rows = table("request", "end", "E2E", "TTFT", "prompt", "output", right=("E2E", "TTFT", "prompt", "output"))
    for request in requests:
        end = request["end"] or "in flight"
        told = f"{end}: {request['error_type']}" if with_errors and request["error_type"] else end
        rows.add_row(
            Text(shortened(request["client_request_id"] or request["request_id"], 44)),
            Text(shortened(told, 40), style=_END_STYLES.get(end, "")),
            duration(request["e2e_seconds"]),
            duration(request["ttft_seconds"]),
            _number(request["prompt_tokens"]),
            _number(request["output_tokens"]),
        )
    return rows


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _losses(console: Console, document: Mapping[str, Any]) -> None:
    console.print()
    dropped = {signal: number for signal, number in document["dropped"].items() if number}
    if dropped:
        told = ", ".join(f"{number:,} {shortened(signal, 40)}" for signal, number in dropped.items())
        console.print(Text(f"dropped: {told}", style="bold yellow"))
    else:
        none = "no drop is on record" if document["status"] == "lost" else "nothing was dropped"
        console.print(Text(none, style="dim"))
    if (deleted := document["deleted"])["segments"]:
        parts = [_deleted(table, counts) for table, counts in deleted["tables"].items()]
        told = f"deleted by retention: {count(deleted['segments'], 'segment')}, {deleted['bytes'] / 1e6:,.1f} MB"
        console.print(
            Text(f"{told} ({'; '.join(parts)}); no figure above counts them" if parts else told, style="yellow")
        )
    for warning in document["warnings"]:
        console.print(Text.assemble(("warning: ", "bold yellow"), shortened(warning, 300)))


def _deleted(table_name: str, counts: Mapping[str, Any]) -> str:
    rows = count(counts["segments"], "segment") if counts["rows"] is None else count(counts["rows"], "row")
    return f"{rows} of {shortened(table_name, 20)}"


def _pairs() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    return grid
