"""A GGUF file's vocabulary as `tokenizer.json` and `tokenizer_config.json`. Torch-free; knows no weights.

A GGUF file names its pre-tokenizer instead of spelling it out, and a wrong one gives wrong ids silently. So the
names are a table here, each entry as the family's own `tokenizer.json` has it, and a name that is not in the table
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferdbg.engine.errors import ModelError

__all__ = ["write_tokenizer"]

CONTROL, USER_DEFINED = 3, 4  # gguf.TokenType

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTE_LEVEL_UNSPLIT = {**BYTE_LEVEL, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL_UNSPLIT]}


def _tiktoken_regex(digits: str) -> str:
    """The pattern of cl100k_base, which Llama 3 and Qwen 2 share but for how many digits go together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True, slots=True)
class BytePairStyle:
    """What `tokenizer.ggml.pre` stands for."""

    pre_tokenizer: Mapping[str, Any]
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False  # where the file does not say


LLAMA3 = BytePairStyle(_split(_tiktoken_regex(r"\p{N}{1,3}")), ignore_merges=True, adds_bos=True)
QWEN2 = BytePairStyle(_split(_tiktoken_regex(r"\p{N}")), normalizer={"type": "NFC"})
STYLES = {
    "gpt-2": BytePairStyle(BYTE_LEVEL),
    "smollm": BytePairStyle({"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}


def write_tokenizer(fields: Mapping[str, Any], directory: Path) -> None:
    """Writes both files from a GGUF file's metadata (its key: its value).

    Raises:
        ModelError: no vocabulary, an inconsistent one, or a kind of tokenizer that is not supported.
    """
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise ModelError("the GGUF file's vocabulary has the same token twice")
    specials = {name: _special(fields, tokens, key) for name, key in SPECIAL_KEYS.items()}
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"the GGUF file's tokenizer is of kind {kind!r}; supported is 'gpt2' (byte-level BPE)")
    name = fields.get("tokenizer.ggml.pre")
    style = STYLES.get(name) if isinstance(name, str) else None
    if style is None:
        raise ModelError(
            f"the GGUF file's pre-tokenizer is {name!r}; a wrong guess would give wrong token ids. "
            f"Supported: {', '.join(sorted(STYLES))}. Use the model's original checkpoint instead"
        )
    adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", style.adds_bos))
    if adds_bos and specials["bos_token"] is None:
        raise ModelError("the GGUF file asks for a BOS token and names none")
    pipeline = _pipeline(fields, tokens, style, specials["bos_token"] if adds_bos else None)
    (directory / "tokenizer.json").write_text(json.dumps(pipeline, ensure_ascii=False), encoding="utf-8")
    config = {
        # The class that takes tokenizer.json as it is; a family's own class would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in specials.items() if token is not None},
    }
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )


SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def _special(fields: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    token_id = fields.get(key)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ModelError(f"the GGUF file's {key} is {token_id}, outside its vocabulary of {len(tokens)} tokens")
    return str(tokens[token_id])


def _pipeline(
    fields: Mapping[str, Any], tokens: list[str], style: BytePairStyle, bos_token: str | None
) -> dict[str, Any]:
    types = fields.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens and {len(types)} token types")
    added = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for token_id, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": style.normalizer,
        "pre_tokenizer": style.pre_tokenizer,
        "post_processor": None if bos_token is None else _prepend(bos_token, tokens.index(bos_token)),
        "decoder": {**BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": style.ignore_merges,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [_merge(merge) for merge in fields.get("tokenizer.ggml.merges") or ()],
        },
    }


def _merge(merge: str) -> list[str]:
    # As llama.cpp splits them: at the first space that is not the first character.
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ModelError(f"the GGUF file has the merge {merge!r}, which is not two tokens")
    return [merge[:cut], merge[cut + 1 :]]


def _prepend(bos_token: str, bos_token_id: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": bos_token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {bos_token: {"id": bos_token, "ids": [bos_token_id], "tokens": [bos_token]}},
    }
