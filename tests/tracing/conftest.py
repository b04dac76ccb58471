from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inferdbg.tracing.recording_config import RecordingConfig
from inferdbg.tracing.session import Recording, start_recording


def _load(name: str) -> ModuleType:
    """Importlib mode gives test folders no package; helpers are loaded once, as `tracing_<name>`."""
    spec = importlib.util.spec_from_file_location(f"tracing_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_load("factories")
_load("otlp_receivers")


def require_tool(name: str) -> str:
    """The tool's path. Without it the test skips, or fails where INFERDBG_REQUIRE_ALL=1 says that it must be there."""
    path = shutil.which(name)
    if path is None:
        message = f"{name} is not installed"
        if os.environ.get("INFERDBG_REQUIRE_ALL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(name="require_tool")
def _require_tool() -> Callable[[str], str]:
    return require_tool


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Recording]]:
    """Starts recordings into `tmp_path/run` (or `run_dir=`), and closes those left open."""
    started: list[Recording] = []

    def make(run_dir: Path | None = tmp_path / "run", **changes: Any) -> Recording:
        recording = start_recording(RecordingConfig(run_dir=run_dir, **changes))
        started.append(recording)
        return recording

    yield make
    for recording in started:
        recording.close()


@contextlib.contextmanager
def _full_disk(max_bytes: int) -> Iterator[None]:
    """No file may grow past so many bytes: the kernel's own refusal, without a disk to fill."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def full_disk() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    return _full_disk
