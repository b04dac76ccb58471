from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.engine.serving.server import ServerHandle

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file

from serving_events import Heard
from serving_models import train_tokenizer, write_tokenizer

FACTORY = "fake_core:build"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


@pytest.fixture(scope="session")
def fake_model_dir(tmp_path_factory, tokenizer) -> Path:
    directory = tmp_path_factory.mktemp("parrot")
    write_tokenizer(directory, tokenizer)
    return directory


@pytest.fixture(autouse=True, scope="session")
def _fake_core_is_importable():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield


@pytest.fixture(scope="session")
def make_server(fake_model_dir):
    """Makes a handle on a server with the fake core, not started yet."""

    def make(observer=None, *, core=None, front=None, model_dir=fake_model_dir, **options):
        return ServerHandle(
            CoreConfig(model_dir=model_dir, **(core or {})),
            FrontConfig(**({"model_name": "parrot", "model_dir": model_dir, "port": 0} | (front or {}))),
            observer if observer is not None else Heard(),
            **({"engine_factory": FACTORY} | options),
        )

    return make


@pytest.fixture
def start_server(make_server):
    """Starts servers with the fake core; all are stopped at the end."""
    handles = []

    def start(*args, **kwargs):
        handle = make_server(*args, **kwargs)
        handle.start()
        handles.append(handle)
        return handle

    yield start
    for handle in handles:
        handle.stop(at_once=True)
