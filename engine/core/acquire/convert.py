"""Turns a GGUF file into an ordinary checkpoint, in a process of its own: this module stays torch-free."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from inferdbg.engine.core.acquire.progress import OnProgress
from inferdbg.engine.errors import EnvironmentLacks, ModelError

__all__ = ["convert_to", "is_made_from"]

CONVERTER_VERSION = 1  # to be raised when the same GGUF file becomes another checkpoint: caches are rebuilt then
SOURCE_FILE = "inferdbg-source.json"


def convert_to(gguf: Path, entry: Path, source: Mapping[str, str], on_progress: OnProgress) -> None:
    """Writes the checkpoint to the new directory `entry`, with a manifest of what it was made from (`source`).

    Raises:
        ModelError: the file is corrupt, or its architecture or tokenizer is not supported.
        EnvironmentLacks: the converting process died.
    """
    stage = "converting to a checkpoint"
    on_progress(stage, None)
    # -P: without it, files of the current directory that are named like modules would be run.
    command = [sys.executable, "-P", "-m", "inferdbg.engine.core.acquire.gguf_checkpoint", str(gguf), str(entry)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    lines = [line for line in errors.splitlines() if line.strip()]
    if process.returncode == ModelError.exit_code and lines:
        raise ModelError(lines[-1])
    if process.returncode != 0:
        tail = "\n  ".join(lines[-5:])
        raise EnvironmentLacks(f"converting {gguf.name} failed with exit status {process.returncode}:\n  {tail}")
    manifest = {
        **source,
        "converter": CONVERTER_VERSION,
        "versions": json.loads(output.splitlines()[-1]),
        "files": {path.name: path.stat().st_size for path in sorted(entry.iterdir())},  # bytes
    }
    (entry / SOURCE_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
    on_progress(stage, 1.0)


def is_made_from(entry: Path, gguf_sha256: str) -> bool:
    """Whether `entry` is a checkpoint that this version made from the GGUF file with that hash, and still whole.

    It looks at sizes alone, which is instant: a file that was lost or cut short is noticed, a flipped bit is not.
    """
    try:
        source = json.loads((entry / SOURCE_FILE).read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(source, dict) or not isinstance(files := source.get("files"), dict) or not files:
        return False
    is_whole = all(_size(entry / name) == size for name, size in files.items())
    return is_whole and source.get("gguf_sha256") == gguf_sha256 and source.get("converter") == CONVERTER_VERSION


def _size(path: Path) -> int | None:
    """Bytes of a file, None where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None
