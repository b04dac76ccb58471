"""The converting process: GGUF file in, checkpoint directory out (bf16 safetensors, JSON). Needs torch.

transformers dequantises and renames the tensors; what it would get wrong silently is refused here. Run as
``python -m inferdbg.engine.core.acquire.gguf_checkpoint GGUF DIRECTORY``; the last line of stdout is a JSON object
of library versions, and a `ModelError` is one line on stderr with its exit code.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from inferdbg.engine.core.acquire.gguf_tokenizer import write_tokenizer
from inferdbg.engine.errors import ModelError

__all__ = ["write_checkpoint"]

# Keys that transformers turns into configuration, or that say nothing a forward pass depends on. Any other one
# (rope scaling, sliding windows, soft caps …) would be dropped silently, and the model would be another one.
UNDERSTOOD_KEYS = frozenset(
    {
        "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "vocab_size",
    }
)  # fmt: skip
TENSOR_NAMES = "tensor_names"  # beside a file's own keys, which have dots
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def write_checkpoint(path: Path, directory: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files to a new directory.

    Raises:
        ModelError: the file is corrupt or of a kind that is not supported.
    """
    fields = _read_fields(path)
    _check_supported(fields)
    directory.mkdir()
    write_tokenizer(fields, directory)
    config = _config(path, fields)
    if config.vocab_size < len(fields["tokenizer.ggml.tokens"]):
        raise ModelError(
            f"the GGUF file has {len(fields['tokenizer.ggml.tokens'])} tokens and only {config.vocab_size} embeddings"
        )
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    config.architectures = [type(model).__name__]
    tensors = _load(path, return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)["tensors"]
    _check_tensors(model, tensors, len(fields[TENSOR_NAMES]))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        fields[TENSOR_NAMES] = [tensor.name for tensor in reader.tensors]
    except Exception as error:  # numpy, struct, unicode, key errors: whatever a truncated file provokes
        raise ModelError(f"{path.name} is not a readable GGUF file: {type(error).__name__}: {error}") from error
    return fields


def _check_supported(fields: dict[str, Any]) -> None:
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"the GGUF file's architecture is {architecture!r}; supported: {', '.join(ARCHITECTURES)}. "
            "Use the model's original checkpoint instead"
        )
    prefix = f"{architecture}."
    unknown = sorted(
        key for key in fields if key.startswith(prefix) and key.removeprefix(prefix) not in UNDERSTOOD_KEYS
    )
    unknown += [name for name in fields[TENSOR_NAMES] if name.startswith("rope_")]
    if unknown:
        raise ModelError(
            f"the GGUF file states {', '.join(unknown)}, which the conversion does not carry over. "
            "Use the model's original checkpoint instead"
        )


def _config(path: Path, fields: dict[str, Any]) -> PreTrainedConfig:
    values = _load(path)["config"]
    values.pop("_model_name_or_path", None)
    values["head_dim"] = _head_dim(fields)
    for name, value in values.items():
        if isinstance(value, float):  # stored as float32: 1e-5 comes back as 9.999999747378752e-06
            values[name] = float(str(np.float32(value)))
    return AutoConfig.for_model(**values)


def _head_dim(fields: dict[str, Any]) -> int:
    """The size of a head, which must be that of keys, of values and of what is rotated."""
    prefix = fields["general.architecture"]
    heads, hidden = (fields.get(f"{prefix}.{key}") for key in ("attention.head_count", "embedding_length"))
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        raise ModelError(f"the GGUF file has no usable {prefix}.attention.head_count and {prefix}.embedding_length")
    key_length: int = fields.get(f"{prefix}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(f"{prefix}.{key}", key_length) != key_length:
            raise ModelError(
                f"the GGUF file's {prefix}.{key} is {fields[f'{prefix}.{key}']}, its heads are of {key_length}; "
                "such models are not supported"
            )
    return key_length


def _load(path: Path, **options: Any) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = load_gguf_checkpoint(str(path), **options)  # type: ignore[no-untyped-call]
    except Exception as error:  # transformers does not say which: a tensor cut short, a type it does not know …
        raise ModelError(f"{path.name} cannot be converted: {type(error).__name__}: {error}") from error
    return loaded


def _check_tensors(model: PreTrainedModel, tensors: dict[str, torch.Tensor], num_stored: int) -> None:
    """Every parameter has its tensor, every stored tensor its parameter, and the shapes are right."""
    expected = {name: parameter.shape for name, parameter in model.state_dict().items()}
    tied: dict[str, str] = model.all_tied_weights_keys
    for name in tied:
        if name not in tensors:
            expected.pop(name)
    wrong = sorted(expected.keys() ^ tensors.keys())
    wrong += [name for name in expected.keys() & tensors.keys() if expected[name] != tensors[name].shape]
    if len(tensors) != num_stored:  # transformers leaves out what it has no place for
        wrong.append(f"{num_stored} stored, {len(tensors)} used")
    if wrong:
        raise ModelError(f"the GGUF file's tensors do not fit its configuration: {', '.join(wrong[:5])}")


def main() -> int:
    """The process's entry; returns its exit status."""
    torch.set_num_threads(1)  # the work is in numpy; idle threads would only get in the way
    source, directory = map(Path, sys.argv[1:])
    try:
        write_checkpoint(source, directory)
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    versions = {name: version(name) for name in ("inferdbg", "gguf", "torch", "transformers")}
    sys.stdout.write(f"{json.dumps(versions)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
