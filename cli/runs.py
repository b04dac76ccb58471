"""Which run a command line means: a directory, a name under `runs/`, or `latest` (`latest~1` is the one before)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from inferdbg.engine.errors import RunError

__all__ = ["RUNS", "find_run"]

RUNS = Path("runs")
MANIFEST = "run.json"


def find_run(text: str, runs: Path = RUNS) -> Path:
    """The run's directory.

    Raises:
        RunError: there is none of that name.
    """
    if match := re.fullmatch(r"latest(?:~(\d{1,6}))?", text):
        back = int(match[1] or 0)
        found = sorted((path.parent for path in runs.glob(f"*/{MANIFEST}")), key=_started)
        if back >= len(found):
            raise RunError(f"{text}: there are {len(found)} runs in {runs}/; record one with inferdbg serve --trace")
        return found[-1 - back]
    for path in (Path(text), runs / text):
        if (path / MANIFEST).is_file():
            return path
    if not Path(text).exists():
        raise RunError(f"{text}: no such run, here or in {runs}/")
    raise RunError(f"{text} is not a run: it has no {MANIFEST}")


def _started(path: Path) -> tuple[int, str]:
    """When a run began; one whose manifest is torn sorts by its name among the oldest."""
    try:
        return (int(json.loads((path / MANIFEST).read_bytes())["clock"]["wall_ns"]), path.name)
    except (OSError, ValueError, KeyError, TypeError):
        return (0, path.name)
