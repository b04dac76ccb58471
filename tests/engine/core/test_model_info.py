"""What is read out of a checkpoint's JSON files, and what is refused with the file's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferdbg.engine.core.model_info import ModelInfo, read_model_info
from inferdbg.engine.errors import ModelError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text)
    return directory


def without(*names: str) -> dict:
    return {name: value for name, value in CONFIG.items() if name not in names}


def test_a_plain_checkpoint(tmp_path: Path) -> None:
    assert read_model_info(write(tmp_path, config=CONFIG)) == ModelInfo(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        max_positions=512,
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        eos_token_ids=frozenset({2}),
    )


def test_eos_is_the_union_of_all_three(tmp_path: Path) -> None:
    write(
        tmp_path,
        config=CONFIG,
        generation_config={"eos_token_id": [5, 6]},
        tokenizer_config={"eos_token": "<end>"},
        tokenizer={"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {"a": 0}}},
    )
    assert read_model_info(tmp_path).eos_token_ids == {2, 5, 6, 9}


@pytest.mark.parametrize(
    ("eos_token", "tokenizer", "expected"),
    [
        ({"content": "<end>", "lstrip": False}, {"added_tokens": [{"id": 9, "content": "<end>"}]}, {9}),
        ("b", {"added_tokens": [], "model": {"vocab": {"a": 0, "b": 7}}}, {7}),
        ("b", {"model": {"vocab": [["a", 0.0], ["b", -1.5]]}}, {1}),
        ("absent", {"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {}}}, set()),
        (None, {}, set()),
    ],
)
def test_the_tokenizers_eos_is_looked_up_by_its_text(
    tmp_path: Path, eos_token: object, tokenizer: dict, expected: set[int]
) -> None:
    write(
        tmp_path,
        config=without("eos_token_id"),
        tokenizer_config={"eos_token": eos_token, "model_max_length": 10**30},
        tokenizer=tokenizer,
    )
    info = read_model_info(tmp_path)
    assert info.eos_token_ids == expected
    assert info.max_positions == 512


def test_no_eos_anywhere(tmp_path: Path) -> None:
    assert read_model_info(write(tmp_path, config=without("eos_token_id"))).eos_token_ids == frozenset()


def test_a_wrapped_language_model_is_read_from_text_config(tmp_path: Path) -> None:
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    inner = without("architectures") | {"eos_token_id": 3, "vocab_size": 77}
    info = read_model_info(write(tmp_path, config=outer | {"text_config": inner}))
    assert info.architecture == "Gemma3ForConditionalGeneration"
    assert info.vocab_size == 77
    assert info.eos_token_ids == {1, 3, 106}


@pytest.mark.parametrize(
    ("change", "kv_heads", "head_dim"),
    [
        ({"head_dim": 24}, 2, 24),
        ({"head_dim": None}, 2, 8),
        ({"num_key_value_heads": None}, 8, 8),
        ({"num_key_value_heads": None, "head_dim": 5}, 8, 5),
    ],
)
def test_head_sizes_fall_back_as_in_transformers(tmp_path: Path, change: dict, kv_heads: int, head_dim: int) -> None:
    info = read_model_info(write(tmp_path, config=CONFIG | change))
    assert (info.num_kv_heads, info.head_dim) == (kv_heads, head_dim)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json"),
        ({"config": "{"}, r"config\.json is not valid JSON"),
        ({"config": "\x00\x01"}, r"config\.json is not valid JSON"),
        ({"config": "[" * 100_000}, r"config\.json is not valid JSON"),
        ({"config": [1]}, r"config\.json holds a JSON list"),
        ({"config": CONFIG, "generation_config": "oops"}, r"generation_config\.json is not valid JSON"),
        ({"config": CONFIG, "tokenizer_config": "oops"}, r"tokenizer_config\.json is not valid JSON"),
        (
            {"config": CONFIG, "tokenizer_config": {"eos_token": "x"}, "tokenizer": "oops"},
            r"tokenizer\.json is not valid JSON",
        ),
        ({"config": without("vocab_size")}, "has no vocab_size"),
        ({"config": without("max_position_embeddings")}, "has no max_position_embeddings"),
        ({"config": without("architectures")}, "architectures is None"),
        ({"config": CONFIG | {"architectures": []}}, "architectures is"),
        ({"config": CONFIG | {"vocab_size": -5}}, "vocab_size is -5, not a positive integer"),
        ({"config": CONFIG | {"vocab_size": 1e9}}, "vocab_size is"),
        ({"config": CONFIG | {"vocab_size": True}}, "vocab_size is True"),
        ({"config": CONFIG | {"num_hidden_layers": 2**40}}, "num_hidden_layers is"),
        ({"config": CONFIG | {"hidden_size": 65}}, "not a multiple of num_attention_heads"),
        ({"config": CONFIG | {"num_key_value_heads": 3}}, "not a divisor"),
        ({"config": CONFIG | {"eos_token_id": "</s>"}}, "eos_token_id is '</s>'"),
        ({"config": CONFIG | {"eos_token_id": [2, -1]}}, "eos_token_id is"),
        ({"config": CONFIG, "generation_config": {"eos_token_id": 1.5}}, r"generation_config\.json: eos_token_id"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused(tmp_path: Path, files: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model_info(write(tmp_path, **files))


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"architectures": "\xff\xfe"}')
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_model_info(tmp_path)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        read_model_info(tmp_path / "nothing")
