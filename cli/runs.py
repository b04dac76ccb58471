"""Which run a command line means: a directory, a name under `runs/`, or `latest` (`latest~1` is the one before)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from inferdbg.engine.errors import RunError
from inferdbg.probes.text import message_text
from inferdbg.tracing.run_files import MANIFEST, read_json

__all__ = ["DID_NOT_START", "RUNS", "find_run", "run_argument"]

RUNS = Path("runs")
LATEST = re.compile(r"latest(?:~(\d{1,6}))?")
DID_NOT_START = "did not start"  # how a run ends whose server never answered: `latest` passes over it


def find_run(text: str, runs: Path = RUNS) -> Path:
    """The run's directory.

    Raises:
        RunError: there is none of that name.
    """
    if match := LATEST.fullmatch(text):
        back = int(match[1] or 0)
        manifests = [(path.parent, _manifest(path)) for path in runs.glob(f"*/{MANIFEST}")]
        found = [run for run, _ in sorted((m for m in manifests if not _never_served(m[1])), key=_started)]
        if back >= len(found):
            raise RunError(f"{text}: there are {len(found)} runs in {runs}/; record one with inferdbg serve --trace")
        return found[-1 - back]
    for path in (Path(text), runs / text):
        if (path / MANIFEST).is_file():
            return path
    if not Path(text).exists():
        raise RunError(f"{text}: no such run, here or in {runs}/")
    raise RunError(f"{text} is not a run: it has no {MANIFEST}")


def run_argument(path: Path) -> str:
    """The run as a command line in this directory names it, quoted where a shell needs it; to be copied."""
    text = str(path)
    if text.startswith("-") or LATEST.fullmatch(text):
        text = f"./{text}"
    return message_text(shlex.quote(text))


def _manifest(path: Path) -> dict[str, Any]:
    """What a manifest says; nothing where it is torn."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _never_served(manifest: dict[str, Any]) -> bool:
    ended = manifest.get("ended")
    return isinstance(ended, dict) and ended.get("reason") == DID_NOT_START


def _started(run: tuple[Path, dict[str, Any]]) -> tuple[int, str]:
    """When a run began; one whose manifest is torn sorts by its name among the oldest."""
    path, manifest = run
    try:
        return (int(manifest["clock"]["wall_ns"]), path.name)
    except (KeyError, TypeError, ValueError):
        return (0, path.name)
