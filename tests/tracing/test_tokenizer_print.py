from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from inferdbg.engine.config import CoreConfig
from inferdbg.tracing.reader import open_run
from inferdbg.tracing.tokenizer_print import fingerprint_tokenizer


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<eos>"},
        "chat_template": "{{ x }}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    return directory


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def differing(a, b):
    parts = {name for name in a if name != "sections" and a[name] != b[name]}
    return parts | {f"sections.{name}" for name in a["sections"] if a["sections"][name] != b["sections"][name]}


def test_what_is_there_is_said(model_dir):
    found = fingerprint_tokenizer(model_dir)
    assert found["num_tokens"] == 4
    assert found["special_tokens"] == {"3": "<eos>"}
    assert found["eos_token_ids"] == {"generation_config": [3, 2], "config": 3, "tokenizer": "<eos>"}
    assert found["class"] == "PreTrainedTokenizerFast"
    assert found["library"].startswith("tokenizers ")
    assert fingerprint_tokenizer(model_dir) == found


@pytest.mark.parametrize(
    ("file", "change", "parts"),
    [
        ("tokenizer.json", lambda d: d.update(normalizer={"type": "NFKC"}), {"hash", "sections.normalizer"}),
        (
            "tokenizer.json",
            lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
            {"hash", "sections.pre_tokenizer"},
        ),
        ("tokenizer.json", lambda d: d["model"].update(merges=[]), {"hash", "sections.model"}),
        ("tokenizer.json", lambda d: d["model"]["vocab"].update(b=2, ab=1), {"hash", "vocabulary", "sections.model"}),
        ("tokenizer_config.json", lambda d: d.update(chat_template="{{ y }}"), {"hash", "chat_template"}),
        ("generation_config.json", lambda d: d.update(eos_token_id=2), {"hash", "eos_token_ids"}),
        ("config.json", lambda d: d.update(eos_token_id=1), {"eos_token_ids"}),
    ],
)
def test_a_change_shows_in_its_own_part(model_dir, file, change, parts):
    before = fingerprint_tokenizer(model_dir)
    edit(model_dir / file, change)
    assert differing(before, fingerprint_tokenizer(model_dir)) == parts


def test_a_template_file_wins_over_the_one_in_the_config(model_dir):
    before = fingerprint_tokenizer(model_dir)
    (model_dir / "chat_template.jinja").write_text("{{ y }}")
    assert fingerprint_tokenizer(model_dir)["chat_template"] != before["chat_template"]


def test_a_unigram_vocabulary_is_read_in_its_order(model_dir):
    edit(
        model_dir / "tokenizer.json", lambda d: d.update(model={"type": "Unigram", "vocab": [["x", -1.0], ["y", -2.0]]})
    )
    assert fingerprint_tokenizer(model_dir)["num_tokens"] == 3  # two pieces and the added token


def test_a_checkpoint_without_tokenizer_files_has_an_empty_print(tmp_path):
    found = fingerprint_tokenizer(tmp_path)
    assert found["vocabulary"] is None
    assert found["sections"] is None


def test_the_run_keeps_the_tokenizer_and_reads_it_back(start, model_dir):
    recording = start(core=CoreConfig(model_dir=model_dir))
    recording.close()
    for path in model_dir.iterdir():
        path.unlink()
    run = open_run(recording.run_dir)
    assert run.tokenizer_dir.name == run.manifest["tokenizer"]["hash"]
    assert Tokenizer.from_file(str(run.tokenizer_dir / "tokenizer.json")).encode("ab").ids == [2]
