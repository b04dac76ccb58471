"""What a checkpoint's JSON files say about a model. Torch-free: fronts and readers of runs use it too.

Knows nothing of weights. The declared EOS sets often disagree (generation_config against tokenizer); their union ends
a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferdbg.engine.errors import ModelError

__all__ = ["ModelInfo", "read_model_info"]

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The facts the scheduler, the sampler and the front need."""

    architecture: str  # for instance LlamaForCausalLM
    vocab_size: int  # rows of the embedding: ids at or above it cannot be computed
    max_positions: int  # the model's own context
    num_layers: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]  # the union of what generation_config, config and tokenizer declare


def read_model_info(model_dir: Path) -> ModelInfo:
    """Reads config.json, generation_config.json and the tokenizer's files of a checkpoint.

    The context is config.json's: a tokenizer's `model_max_length` is often a huge placeholder. An EOS that the
    tokenizer names and has no id for declares nothing.

    Raises:
        ModelError: a file is absent or corrupt, or says something that cannot be.
    """
    if not model_dir.is_dir():
        raise ModelError(f"{model_dir} is not a directory; a model is a checkpoint directory with a config.json")
    config = _read(model_dir / "config.json")
    if config is None:
        raise ModelError(f"{model_dir} has no config.json, so it is not a checkpoint; name the directory that has one")
    generation = _read(model_dir / "generation_config.json") or {}
    text = config.get("text_config")
    facts = _Facts(model_dir / "config.json", text if isinstance(text, dict) else config)

    num_heads = facts.count("num_attention_heads")
    if facts.values.get("head_dim") is not None:
        head_dim = facts.count("head_dim")
    else:
        hidden_size = facts.count("hidden_size")
        if hidden_size % num_heads:
            raise facts.wrong("hidden_size", f"not a multiple of num_attention_heads ({num_heads}), and no head_dim")
        head_dim = hidden_size // num_heads
    eos = _ids(model_dir / "generation_config.json", generation, "eos_token_id")
    eos |= _ids(facts.path, config, "eos_token_id") | _ids(facts.path, facts.values, "eos_token_id")
    if (tokenizer_eos := _tokenizer_eos(model_dir)) is not None:
        eos |= {tokenizer_eos}
    return ModelInfo(
        architecture=_architecture(facts.path, config),
        vocab_size=facts.count("vocab_size"),
        max_positions=facts.count("max_position_embeddings"),
        num_layers=facts.count("num_hidden_layers"),
        num_kv_heads=num_heads if facts.values.get("num_key_value_heads") is None else facts.kv_heads(num_heads),
        head_dim=head_dim,
        eos_token_ids=eos,
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """The language model's part of config.json, read with suspicion."""

    path: Path
    values: Json

    def count(self, name: str) -> int:
        value = self.values.get(name)
        if value is None:
            raise ModelError(f"{self.path} has no {name}: the file is incomplete or not a language model's")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.wrong(name, "not a positive integer")
        return value

    def kv_heads(self, num_heads: int) -> int:
        value = self.count("num_key_value_heads")
        if num_heads % value:
            raise self.wrong("num_key_value_heads", f"not a divisor of num_attention_heads ({num_heads})")
        return value

    def wrong(self, name: str, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {name} is {self.values.get(name)!r:.80}, {reason}; the checkpoint is corrupt")


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); get the checkpoint again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, expected an object; get the checkpoint again")
    return value


def _architecture(path: Path, config: Json) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{path}: architectures is {names!r:.80}, expected a list with the model's class name")
    return names[0]


def _ids(path: Path, values: Json, name: str) -> frozenset[int]:
    """A declared token id, or list of them, as a set."""
    declared = values.get(name)
    if declared is None:
        return frozenset()
    ids = declared if isinstance(declared, list) else [declared]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ModelError(f"{path}: {name} is {declared!r:.80}, expected token ids; correct it or remove it")
    return frozenset(ids)


def _tokenizer_eos(model_dir: Path) -> int | None:
    """The id of the EOS that tokenizer_config.json names as text (a string, or an object with `content`)."""
    config = _read(model_dir / "tokenizer_config.json") or {}
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    pipeline = _read(model_dir / "tokenizer.json") or {}
    for added in pipeline.get("added_tokens") or ():
        if isinstance(added, dict) and added.get("content") == token and isinstance(added.get("id"), int):
            return int(added["id"])
    model = pipeline.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: [[token, score], …]
        vocab = {entry[0]: token_id for token_id, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    token_id = vocab.get(token) if isinstance(vocab, dict) else None
    return token_id if isinstance(token_id, int) else None
