"""A GGUF file becomes the checkpoint it was made from, bit for bit, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_gguf import TOKENS, tiny_model, write_gguf
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from inferdbg.engine.core.acquire.gguf_checkpoint import write_checkpoint
from inferdbg.engine.core.model_info import read_model_info
from inferdbg.engine.errors import ModelError


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_and_configuration_come_back_bit_for_bit(tmp_path: Path, family: str, tied: bool) -> None:
    original = tiny_model(family, tie_word_embeddings=tied)
    directory = tmp_path / "checkpoint"
    write_checkpoint(write_gguf(tmp_path / "a.gguf", family, model=original), directory)

    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.dtype == torch.bfloat16
    weights = loaded.state_dict()
    assert weights.keys() == original.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.state_dict().items())
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, original(ids).logits)
    assert loaded.config.rms_norm_eps == 1e-5
    info = read_model_info(directory)
    assert (info.architecture, info.vocab_size, info.max_positions) == (type(original).__name__, len(TOKENS), 128)
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (2, 2, 8)
    assert info.eos_token_ids == {2}


def test_autotokenizer_takes_the_pipeline_as_it_is(tmp_path: Path) -> None:
    write_checkpoint(write_gguf(tmp_path / "a.gguf"), tmp_path / "checkpoint")
    raw = Tokenizer.from_file(str(tmp_path / "checkpoint" / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    text = "hello world 12 <|im_start|>héllo\n<|im_end|>"
    assert auto(text)["input_ids"] == raw.encode(text).ids
    assert auto.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    assert (auto.bos_token_id, auto.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture is 'mamba'; supported: llama, qwen2, qwen3"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type, which the conversion does not carry over"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window"),
        ({"tokenizer.ggml.pre": "jais"}, "pre-tokenizer is 'jais'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer is None"),
        ({"tokenizer.ggml.model": "t5"}, "kind 't5'"),
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.tokens": [*TOKENS, *(f"x{i}" for i in range(9))]}, "token types"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[0]]}, "same token twice"),
        ({"tokenizer.ggml.eos_token_id": 99_999}, "outside its vocabulary"),
        ({"tokenizer.ggml.merges": ["hello"]}, "not two tokens"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, its heads are of 8"),
        ({"llama.attention.head_count": None}, "no usable llama.attention.head_count"),
        ({"llama.feed_forward_length": 64}, "do not fit its configuration"),
        ({"llama.block_count": 3}, "do not fit its configuration"),
        ({"llama.block_count": 1}, "do not fit its configuration"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused(tmp_path: Path, fields: dict, message: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", fields=fields)
    with pytest.raises(ModelError, match=message):
        write_checkpoint(path, tmp_path / "checkpoint")


@pytest.mark.parametrize("kept", [0, 3, 100, 9_000, -10])
def test_a_truncated_file_is_a_model_error_with_its_name(tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"a\.gguf is not a readable GGUF file"):
        write_checkpoint(path, tmp_path / "checkpoint")


def test_a_bos_that_the_file_asks_for_is_prepended(tmp_path: Path) -> None:
    write_checkpoint(
        write_gguf(tmp_path / "a.gguf", fields={"tokenizer.ggml.add_bos_token": True}), tmp_path / "checkpoint"
    )
    raw = Tokenizer.from_file(str(tmp_path / "checkpoint" / "tokenizer.json"))
    ids = raw.encode("hello", add_special_tokens=False).ids
    assert raw.encode("hello").ids == [1, *ids]
    assert json.loads((tmp_path / "checkpoint" / "tokenizer_config.json").read_text())["bos_token"] == "<|im_start|>"
