"""`inferdbg diff-tokens RUN_A RUN_B`: are the token ids of two runs the same, and where do they part?"""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["EXAMPLE", "diff_tokens"]

EXAMPLE = "Example: inferdbg diff-tokens runs/monday runs/tuesday --json | jq .verdict"
DIFFERENT = 1
INCONCLUSIVE = 3


def diff_tokens(
    run_a: Annotated[str, typer.Argument(help="A run directory, or `latest`.")],
    run_b: Annotated[str, typer.Argument(help="The run to compare it with.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one inferdbg.diff-tokens/1 document.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="How many differing requests to print in full.")] = 10,
    exact: Annotated[
        bool, typer.Option("--exact", help="Requests that only one of the runs has count as a difference too.")
    ] = False,
) -> int:
    """Compare two runs token by token: prompts, outputs, and the first difference of each request.

    Requests are matched by what they replay, else by the client's request id, else by their prompt.

    Exit codes: 0 the same, 1 different, 2 a run that cannot be read, 3 not decided: nothing that was compared differs,
    and some requests could not be compared, or not to their end.
    """
    from inferdbg.cli.render.diff_tokens import render_diff
    from inferdbg.cli.render.terminal import output, print_json, warn
    from inferdbg.cli.runs import find_run
    from inferdbg.probes.diff_tokens.compare import Verdict
    from inferdbg.probes.diff_tokens.document import diff_document
    from inferdbg.probes.diff_tokens.report import diff_runs
    from inferdbg.probes.diff_tokens.run_log import RunTokenLog, differing_settings, names_apart, warnings_of

    path_a, path_b = find_run(run_a), find_run(run_b)
    name_a, name_b = names_apart(path_a, path_b)
    log_a, log_b = RunTokenLog(path_a, name_a), RunTokenLog(path_b, name_b)
    settings = differing_settings(log_a, log_b)
    diff = diff_runs(log_a, log_b)
    warnings = warnings_of(log_a, log_b, diff)
    document = diff_document(diff, log_a.name, log_b.name, settings, log_a.decoder, log_b.decoder, warnings)
    for warning in warnings:
        warn(warning)
    if as_json:
        print_json(document)
    else:
        render_diff(output(), document, limit)
    if diff.is_different or (exact and diff.has_unmatched):
        return DIFFERENT
    return INCONCLUSIVE if diff.verdict is Verdict.INCONCLUSIVE else 0
