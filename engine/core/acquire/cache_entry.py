"""One directory of the cache, made once and whole: locked, built beside its place, renamed into it.

Knows nothing of models. A reader sees no directory or a complete one, whatever happens to the builder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inferdbg.engine.core.acquire.progress import OnProgress
from inferdbg.engine.errors import EnvironmentLacks

__all__ = ["make_entry"]


def make_entry(
    target: Path, is_current: Callable[[Path], bool], build: Callable[[Path], None], on_progress: OnProgress
) -> Path:
    """Returns `target`, built first unless `is_current(target)` already.

    `build` is given an empty working directory, on the same file system, and leaves the entry in its `entry`
    subdirectory. What an interrupted builder left behind is removed by the next one. Builders of the same entry
    wait for each other.

    Raises:
        EnvironmentLacks: the cache cannot be written, or its disk is full.
    """
    if is_current(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, on_progress):
            if not is_current(target):
                _build_locked(target, build)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR):
            raise EnvironmentLacks(
                f"the model cache {target.parent} cannot be written: {error.strerror}. "
                "Free some space there, or let INFERDBG_CACHE name another directory"
            ) from error
        raise
    return target


@contextmanager
def _lock(target: Path, on_progress: OnProgress) -> Iterator[None]:
    # The lock file stays: removing it would let a third process lock a new file of the same name.
    with open(target.parent / f".{target.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("waiting for another process that is making the same model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_locked(target: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{target.name}.tmp-"
    for leftover in target.parent.glob(f"{prefix}*"):  # nobody else builds: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        build(work)
        entry = work / "entry"
        _sync(entry)
        if target.exists():
            target.rename(work / "outdated")
        entry.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(entry: Path) -> None:
    """The files reach the disk before the name does: after a power cut an entry is whole or absent."""
    for path in (*entry.iterdir(), entry):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
