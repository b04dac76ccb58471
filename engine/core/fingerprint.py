"""Tells checkpoints apart by their bytes. Torch-free; knows no architecture and loads no tensor."""

from __future__ import annotations

import hashlib
from pathlib import Path

from inferdbg.engine.errors import ModelError

__all__ = ["fingerprint"]

FINGERPRINTED = ("config.json", "generation_config.json", "*.safetensors")


def fingerprint(model_dir: Path) -> str:
    """sha256 over the configuration and the safetensors files (names and contents): equal for equal checkpoints.

    Reads every byte, at about a gigabyte a second.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(path for pattern in FINGERPRINTED for path in model_dir.glob(pattern)):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            digest.update(path.name.encode() + b"\0" + content)
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
