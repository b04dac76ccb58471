"""Tells two checkpoints apart without reading all of their weights. Knows no architecture and loads no tensor."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["fingerprint_model"]

SAMPLES = 256  # blocks read of each weight file, evenly spread: the first and the last are among them
BLOCK_BYTES = 4096
_CONFIGS = ("config.json", "generation_config.json")


def fingerprint_model(model_dir: Path) -> str:
    """``sampled-sha256:…`` over the configuration and, of every weight file, its name, size and `SAMPLES` blocks.

    Equal checkpoints have equal fingerprints; other weights have other ones unless they differ only between samples.
    A megabyte is read per file.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in [model_dir / name for name in _CONFIGS]:
        digest.update(f"{path.name}\0".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            for offset in _offsets(size):
                file.seek(offset)
                digest.update(file.read(BLOCK_BYTES))
    return f"sampled-sha256:{digest.hexdigest()}"


def _offsets(size: int) -> list[int]:
    last = max(0, size - BLOCK_BYTES)
    return sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})
