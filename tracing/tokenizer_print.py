"""A tokenizer's fingerprint: a hash of each of its parts, so that a difference between two runs has a name.

Reads a checkpoint's files; encodes nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from inferdbg.tracing.run_files import TOKENIZER, make_private

__all__ = ["TOKENIZER_FILES", "copy_tokenizer", "fingerprint_tokenizer"]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
_SECTIONS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder", "truncation", "padding")


def fingerprint_tokenizer(model_dir: Path) -> dict[str, Any]:
    """Hashes (sha256, 16 hex digits) of the id → string map, of each pipeline section, of the chat template; specials
    and EOS sets as they are; library and class. A part that the checkpoint lacks is None.
    """
    pipeline = _json(model_dir / "tokenizer.json")
    config = _json(model_dir / "tokenizer_config.json")
    files = [model_dir / name for name in TOKENIZER_FILES if (model_dir / name).is_file()]
    return {
        "hash": _hash_bytes(part for path in files for part in (path.name.encode(), path.read_bytes())),
        "vocabulary": _hash_json(sorted(_vocabulary(pipeline).items())) if pipeline else None,
        "num_tokens": len(_vocabulary(pipeline)) if pipeline else None,
        "sections": {name: _hash_json(pipeline.get(name)) for name in _SECTIONS} if pipeline else None,
        "special_tokens": {
            str(token["id"]): token["content"] for token in pipeline.get("added_tokens", []) if token.get("special")
        },
        "chat_template": _template_hash(model_dir, config),
        "eos_token_ids": {
            "generation_config": _json(model_dir / "generation_config.json").get("eos_token_id"),
            "config": _json(model_dir / "config.json").get("eos_token_id"),
            "tokenizer": _content(config.get("eos_token")),
        },
        "add_bos_token": config.get("add_bos_token"),
        "class": config.get("tokenizer_class"),
        "library": f"tokenizers {metadata.version('tokenizers')}",
    }


def copy_tokenizer(model_dir: Path, run_dir: Path, digest: str) -> str:
    """Copies the tokenizer into the run, under its hash; returns the path inside the run. Raises OSError."""
    target = run_dir / TOKENIZER / digest
    make_private(target)
    for name in TOKENIZER_FILES:
        if (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, target / name)
    return str(target.relative_to(run_dir))


def _vocabulary(pipeline: dict[str, Any]) -> dict[int, str]:
    """Id to string, added tokens over the model's own. Unigram lists its pieces in order of id."""
    vocab = pipeline.get("model", {}).get("vocab", {})
    if isinstance(vocab, dict):
        table = {int(token_id): token for token, token_id in vocab.items()}
    else:
        table = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    table.update({int(token["id"]): token["content"] for token in pipeline.get("added_tokens", [])})
    return table


def _template_hash(model_dir: Path, config: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return _hash_bytes([path.read_bytes()])
    template = config.get("chat_template")
    return None if template is None else _hash_json(template)


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _hash_json(value: Any) -> str:
    return _hash_bytes([json.dumps(value, sort_keys=True, ensure_ascii=True).encode()])


def _hash_bytes(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]
