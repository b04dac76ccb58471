"""Reads a checkpoint directory into a transformers model, from disk alone.

Knows no pages and no attention. Never runs code from a checkpoint, and never unpickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from inferdbg.engine.core.model.families import check_architecture, check_config
from inferdbg.engine.core.model_info import ModelInfo
from inferdbg.engine.errors import ModelError

__all__ = ["load_model"]


def load_model(model_dir: Path, info: ModelInfo, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Loads a supported model for inference.

    Raises:
        ModelError: unsupported, absent, incomplete or corrupt; the message says which file or tensor is at fault.
    """
    config = _read_config(model_dir)
    check_config(config)
    _require_safetensors(model_dir)
    model_class = getattr(transformers, info.architecture)
    silence: Callable[[], None] = transformers.utils.logging.disable_progress_bar
    silence()  # its bars would be drawn among a server's messages
    try:
        model, loading = model_class.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"the weights in {model_dir} cannot be read ({reason[0][:300] if reason else type(error).__name__}); "
            "the checkpoint is incomplete or corrupt: get it again"
        ) from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if keys := sorted(str(key) for key in loading.get(what) or ()):
            raise ModelError(
                f"the weights in {model_dir} do not fit its config.json: {len(keys)} {what.replace('_', ' ')}, "
                f"such as {keys[0]}; the checkpoint is incomplete, corrupt or of another model"
            )
    _require_finite(model, model_dir)
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded


def _read_config(model_dir: Path) -> PretrainedConfig:
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); get the checkpoint again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds no JSON object; get the checkpoint again")
    check_architecture(raw)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates with many exception types of its own and others'
        raise ModelError(f"{path} is refused by transformers: {str(error).strip()[:500]}") from error
    return config


def _require_safetensors(model_dir: Path) -> None:
    """The files that an index names, or model.safetensors, are there and not empty."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a valid index of weights; get the checkpoint again") from error
    else:
        names = ["model.safetensors"]
    for name in names:
        path = model_dir / str(name)
        if not path.is_file():
            others = sorted(path.name for path in model_dir.glob("*.bin")) + sorted(
                path.name for path in model_dir.glob("*.pt*")
            )
            hint = f" ({others[0]} is not read: pickled files can run code)" if others else ""
            raise ModelError(f"{model_dir} has no {name}{hint}; weights are read from safetensors or GGUF only")
        if path.stat().st_size < 8:
            raise ModelError(f"{path} is empty or cut off ({path.stat().st_size} bytes); get the checkpoint again")


def _require_finite(model: PreTrainedModel, model_dir: Path) -> None:
    """NaN or infinity in a weight would reach other sequences through recycled pages."""
    for name, tensor in model.named_parameters():
        if not torch.isfinite(tensor.sum(dtype=torch.float32)).item() and not torch.isfinite(tensor).all().item():
            raise ModelError(f"{name} in {model_dir} holds NaN or infinity; the checkpoint is corrupt")
