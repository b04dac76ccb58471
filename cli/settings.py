"""Defaults from a file: `inferdbg.toml`, or `[tool.inferdbg]` in pyproject.toml, in the working directory.

A table per verb, keys spelled like the flags. Precedence is the command line's: flag, `INFERDBG_<VERB>_<FLAG>`,
file, default. Knows no verb: the caller says which flags exist.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferdbg.engine.errors import UsageError

__all__ = ["ENV_PREFIX", "load_settings"]

ENV_PREFIX = "INFERDBG"


def load_settings(directory: Path, flags: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Defaults per verb, keyed by parameter name (``max_num_seqs``). Empty where there is no file.

    Args:
        directory: where to look; `inferdbg.toml` wins over pyproject.toml.
        flags: of every verb, the parameter name by flag (``{"json": "as_json"}``).

    Raises:
        UsageError: no TOML, or a verb or flag that does not exist.
    """
    own, project = directory / "inferdbg.toml", directory / "pyproject.toml"
    if own.is_file():
        tables, source = _read(own), own.name
    elif project.is_file():
        tables, source = _read(project).get("tool", {}).get("inferdbg", {}), f"{project.name} [tool.inferdbg]"
    else:
        return {}
    return {verb: _verb(verb, table, flags, source) for verb, table in tables.items()}


def _verb(verb: str, table: object, flags: Mapping[str, Mapping[str, str]], source: str) -> dict[str, Any]:
    if verb not in flags or not isinstance(table, dict):
        raise UsageError(f"{source}: {verb!r} is not a verb's table; verbs are {', '.join(sorted(flags))}")
    spelled = {key.replace("_", "-"): value for key, value in table.items()}
    if unknown := sorted(spelled.keys() - flags[verb].keys()):
        raise UsageError(f"{source}: [{verb}] has no flag {', '.join(unknown)}; see `inferdbg {verb} --help`")
    return {flags[verb][key]: value for key, value in spelled.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} is not valid TOML: {error}") from None
