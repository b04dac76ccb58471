"""`inferdbg show RUN [REQUEST]`: a run at a glance, or one request stage by stage and token by token."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["EXAMPLE", "show"]

EXAMPLE = "Example: inferdbg show latest, then inferdbg show latest placard-night-watch"


def show(
    run: Annotated[str, typer.Argument(help="A run directory, a name in runs/, `latest`, or `latest~1` before it.")],
    request: Annotated[
        str | None, typer.Argument(help="A request id, the id its client gave it, or the beginning of either.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one document: inferdbg.show/1, show-request/1 or show-requests/1.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--requests", help="List all requests of the run, oldest first.")] = False,
    prompt_index: Annotated[int, typer.Option("--prompt", min=0, help="Which prompt of the request.")] = 0,
    choice_index: Annotated[int, typer.Option("--choice", min=0, help="Which choice of the prompt.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="How many tokens to print; 0 prints all.")] = 200,
) -> int:
    """Show what happened in a run, while it is written, after it ended, or after its server was killed.

    With REQUEST: its stages as a waterfall, and its tokens with what the engine was doing at each.
    """
    from inferdbg.cli.render.show_request import render_request
    from inferdbg.cli.render.show_run import render_requests, render_run
    from inferdbg.cli.render.terminal import output, print_json, print_json_list, warn
    from inferdbg.cli.runs import find_run, run_argument
    from inferdbg.probes.request_view import request_document
    from inferdbg.probes.run_view import list_requests, requests_document, run_document
    from inferdbg.tracing.reader import open_run

    if list_all and request is not None:
        raise typer.BadParameter("--requests lists all of them: leave REQUEST out")
    opened = open_run(find_run(run))
    if list_all:
        if as_json:
            print_json_list(requests_document(opened), "requests", list_requests(opened))
        else:
            render_requests(output(), list_requests(opened))
        for warning in opened.warnings:
            warn(warning)
        return 0
    document = (
        run_document(opened) if request is None else request_document(opened, request, prompt_index, choice_index)
    )
    if as_json:
        print_json(document)
    elif request is None:
        render_run(output(), document, run_argument(opened.path))
    else:
        render_request(output(), document, limit)
    return 0
