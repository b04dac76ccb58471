"""`inferdbg demo`: a real model answers real clients, twice; then the two recordings are read and compared."""

from __future__ import annotations

import asyncio
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferdbg.probes.text import message_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLE", "demo"]

EXAMPLE = "Example: inferdbg demo --out runs"
CHANGED = ("--fast-path", "off")  # the one setting that the second server has and the first has not
TROUBLE = 4


def demo(
    model: Annotated[
        str, typer.Option(help="What to serve: an alias, a checkpoint directory or a GGUF file.")
    ] = "smollm2",
    out: Annotated[Path, typer.Option(help="Where the two runs are left.")] = Path("runs"),
    num_requests: Annotated[int, typer.Option("--requests", min=1, max=24, help="How many placards to ask for.")] = 24,
) -> int:
    """Serve a small real model, record two bursts of requests, and see what happened to every one of them.

    Twenty-four museum placards are written at once, streamed, by a server that records everything; then again with the
    same request ids and the fast path off (transformers' own modules run the model). It takes under three minutes once
    the model is there.
    """
    from inferdbg.cli.diff_tokens import diff_tokens
    from inferdbg.cli.museum.burst import import_openai
    from inferdbg.cli.pull import resolve_with_progress
    from inferdbg.cli.render.terminal import diagnostics
    from inferdbg.cli.runs import run_argument
    from inferdbg.cli.show import show

    import_openai()  # what is missing is said now, not when the model is loaded
    say = diagnostics()
    begun = time.monotonic()
    _step(say, 1, f"the model: {model}")
    model_dir = resolve_with_progress(model)
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    first, second = out / f"{stamp}-demo-fast", out / f"{stamp}-demo-plain"
    _step(say, 2, f"serving it, recording everything; {num_requests} placards at once")
    failed = _record(say, model, model_dir, first, num_requests, ())
    _step(say, 3, f"what happened: inferdbg show {run_argument(first)}")
    show(str(first), None)
    _step(say, 4, f"the same requests again, with one engine setting changed: {' '.join(CHANGED)}")
    failed += _record(say, model, model_dir, second, num_requests, CHANGED)
    _step(say, 5, f"are the answers the same? inferdbg diff-tokens {run_argument(first)} {run_argument(second)}")
    # Exit code 1 says that some answers differ; the demo has done its job all the same.
    diff_tokens(str(first), str(second), limit=3)
    _step(say, 6, f"done in {time.monotonic() - begun:.0f} s. What to type next:")
    _next(say, run_argument(first), run_argument(second), model)
    return TROUBLE if failed else 0


def _record(
    say: Console, model: str, model_dir: Path, run_dir: Path, num_requests: int, setting: tuple[str, ...]
) -> int:
    """Serves one burst into `run_dir`; returns how many requests failed."""
    from inferdbg.cli.museum.burst import send_burst
    from inferdbg.cli.museum.placards import ARTWORKS
    from inferdbg.cli.museum.server import running_server
    from inferdbg.cli.render.burst import BurstView
    from inferdbg.engine.core.acquire.resolve import model_name

    name = model_name(model)
    arguments = ("--model", str(model_dir), "--served-model-name", name, "--trace", "--run-dir", str(run_dir), *setting)
    say.print("  starting the server …")
    with running_server(arguments) as url:
        say.print(f"  it answers at {url}")
        with BurstView(say) as view:
            progress = asyncio.run(send_burst(url, name, ARTWORKS[:num_requests], view.update))
    return sum(state.error is not None for state in progress)


def _step(say: Console, number: int, what: str) -> None:
    from rich.text import Text

    say.print()
    say.print(Text.assemble((f"{number}  ", "bold cyan"), (message_text(what), "bold")), soft_wrap=True)


def _next(say: Console, first: str, second: str, model: str) -> None:
    """`first` and `second` name the runs in a command line."""
    for command, why in (
        (f"inferdbg show {first} placard-night-watch", "one request: its stages, its tokens, the steps they came from"),
        (f"inferdbg show {second}", "the second run: compare its prefill and decode with the first one's"),
        (f"inferdbg diff-tokens {first} {second} --json", "the same comparison, for scripts"),
        (f"inferdbg serve --model {message_text(shlex.quote(model))} --trace", "serve it for your own client"),
    ):
        say.print(f"  {command}", soft_wrap=True)  # unbroken, to be copied
        say.print(f"      {why}", style="dim")
