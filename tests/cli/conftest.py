from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inferdbg.cli.main import run
from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.engine.serving.events import Event
from inferdbg.tracing.recording_config import RecordingConfig
from inferdbg.tracing.session import start_recording

HOSTILE_ID = 666
HOSTILE = "\x1b[2J\u202e[red]\n"


def load_helper(name: str, path: str) -> ModuleType:
    """A module of another test folder; importlib mode gives test folders no package."""
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def events() -> Any:
    """The module that makes synthetic events."""
    return load_helper("tracing_factories", "tracing/factories.py")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint that can be served: a random two-layer Llama with a byte-level tokenizer and a template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizers = load_helper("serving_models", "engine/serving/serving_models.py")
    directory = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=400, num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1,
        initializer_range=0.3, **sizes,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizers.write_tokenizer(directory, tokenizers.train_tokenizer())
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights: id n is the word `wn `, one id is hostile."""
    directory = tmp_path_factory.mktemp("model")
    vocab = {f"w{i} ": i for i in range(1000) if i != HOSTILE_ID}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "added_tokens": [{"id": HOSTILE_ID, "content": HOSTILE, "special": False}],
        "decoder": None,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text('{"eos_token_id": 2}')
    return directory


@pytest.fixture
def record(tmp_path: Path, model_dir: Path) -> Callable[..., Path]:
    """Writes events into a run through the real recording; with `close=False` the run stays open."""

    def make(name: str, happened: Iterable[Event], close: bool = True, **changes: Any) -> Path:
        core = CoreConfig(model_dir=model_dir, dtype="float32", **changes.pop("core", {}))
        front = FrontConfig(model_name="tiny", model_dir=model_dir)
        config = RecordingConfig(run_dir=tmp_path / name, core=core, front=front, **changes)
        recording = start_recording(config)
        for event in happened:
            recording.observer(event)
        if close:
            recording.close()
        else:
            assert recording.flush()
        return tmp_path / name

    return make


class Outcome:
    """What one command line gave."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> dict[str, Any]:
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict)
        return parsed


@pytest.fixture
def inferdbg(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command line in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
