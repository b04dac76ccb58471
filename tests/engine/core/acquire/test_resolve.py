"""What `--model` may name, and what a wrong name is told."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from tiny_gguf import write_gguf

from inferdbg.engine.core.acquire import model_name, resolve_model
from inferdbg.engine.core.model_info import read_model_info
from inferdbg.engine.errors import EnvironmentLacks, ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERDBG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def checkpoint(directory: Path, *files: str) -> Path:
    directory.mkdir(parents=True)
    for name in files:
        (directory / name).write_text("{}")
    return directory


def test_a_directory_with_a_checkpoint_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path / "org" / "model", "config.json", "model.safetensors")
    assert resolve_model(str(directory)) == directory
    assert resolve_model("org/model") == Path("org/model")  # a directory comes before a repository id
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/model") == directory


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "has no config.json"),
        (("weights.Q4_0.gguf",), r"name one of them, such as .*weights\.Q4_0\.gguf"),
        (("config.json",), "its weights are missing"),
        (("config.json", "pytorch_model.bin"), r"pytorch_model\.bin, a pickle: reading one can run any code"),
        (("config.json", "model.pt"), r"model\.pt, a pickle"),
    ],
)
def test_a_directory_without_readable_weights_is_refused(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(str(checkpoint(tmp_path / "model", *files)))


def test_pickles_beside_safetensors_do_no_harm(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", "config.json", "model.safetensors", "pytorch_model.bin")
    assert resolve_model(str(directory)) == directory


def test_a_gguf_file_is_converted_once_whatever_it_is_called(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    stages: list[str] = []
    directory = resolve_model(str(path), on_progress=lambda stage, _: stages.append(stage))
    assert directory.parent == cache / "models"
    assert read_model_info(directory).architecture == "LlamaForCausalLM"
    assert json.loads((directory / "inferdbg-source.json").read_text())["file"] == "tiny.gguf"
    assert "converting to a checkpoint" in stages

    stages.clear()
    assert resolve_model(str(path.rename(tmp_path / "other")), on_progress=lambda s, _: stages.append(s)) == directory
    assert stages == ["hashing other"]


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="not a GGUF one"):
        resolve_model("model.gguf")


def test_a_corrupt_gguf_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ModelError, match=r"model\.gguf is not a readable GGUF file"):
        resolve_model("model.gguf")
    assert [path for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smolm2", "Did you mean 'smollm2'"),
        ("SmolLM2", "Did you mean 'smollm2'"),
        ("/no/such/place", "not an existing directory or GGUF file"),
        ("", "there is no model ''"),
        ("a/b/c", "not of the form owner/name"),
        ("-rf/x", "not of the form owner/name"),
        ("x" * 5000, "there is no model"),
        ("bad\0name", "there is no model"),
        ("~nobody-here", "there is no model"),
    ],
)
def test_a_wrong_name_is_told_what_there_is(spec: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(spec)


def test_a_repository_that_cannot_be_reached_names_the_id_and_why_it_was_tried(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentLacks, match=r"no directory or file 'owner/absent' exists here.*cannot be reached"):
        resolve_model("owner/absent")


def _response_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    import httpx

    return kind("refused", response=httpx.Response(404, request=httpx.Request("GET", "http://hub.invalid")))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(errors.RepositoryNotFoundError, "the hub has none of that name"), (errors.GatedRepoError, "it is gated")],
)
def test_a_hub_that_refuses_is_quoted_plainly(kind, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repo_id: str, *, allow_patterns: list[str]) -> str:
        raise _response_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=message):
        resolve_model("owner/name")


def test_only_data_files_are_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fnmatch import fnmatch

    directory = checkpoint(tmp_path / "snapshot", "config.json", "model.safetensors")
    asked: list[str] = []

    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name") == directory
    allowed = [
        name
        for name in (
            *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"),
            *("chat_template.jinja", "tokenizer.model", "pytorch_model.bin", "modeling_x.py", "model.onnx", "x.gguf"),
        )
        if any(fnmatch(name, pattern) for pattern in asked)
    ]
    assert allowed == [
        *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"),
        *("chat_template.jinja", "tokenizer.model"),
    ]


def test_a_model_is_called_by_its_alias_its_id_or_its_files_name(tmp_path: Path) -> None:
    checkpoint(tmp_path / "org" / "model")
    assert model_name("smollm2") == "smollm2"
    assert model_name("owner/name") == "owner/name"
    assert model_name("org/model") == "model"
    assert model_name(str(tmp_path / "org" / "model")) == "model"
    assert model_name(".") == tmp_path.name
    assert model_name("weights/tiny.gguf") == "weights/tiny.gguf"
    (tmp_path / "tiny.gguf").touch()
    assert model_name("tiny.gguf") == "tiny"
