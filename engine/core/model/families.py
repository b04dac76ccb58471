"""Which models are served: a table of what was proven against transformers, and the reasons for refusing the rest.

Knows configurations, no weights. The proof of every entry is in tests/engine/core/model/test_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from inferdbg.engine.errors import ModelError

__all__ = ["FAMILIES", "Family", "check_architecture", "check_config", "family_of"]

LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # angles depend on the position alone
LENGTH_DEPENDENT_ROPE = {
    "dynamic": "its angles change with the length of each sequence, so K already in the pages would be wrong",
    "longrope": "its angles change once a sequence outgrows the original context, so K already in the pages would be "
    "wrong",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A proven architecture: its class in transformers, and what its layers ask of the attention."""

    architecture: str
    model_type: str  # as config.json says
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    experts: bool = False


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama"),
        Family("MistralForCausalLM", "mistral", sliding_window=True),
        Family("Qwen2ForCausalLM", "qwen2", sliding_window=True),
        Family("Qwen3ForCausalLM", "qwen3", sliding_window=True),
        Family("Phi3ForCausalLM", "phi3", sliding_window=True),
        Family("Gemma2ForCausalLM", "gemma2", sliding_window=True, softcap=True),
        Family("Gemma3ForCausalLM", "gemma3_text", sliding_window=True),
        Family("Qwen3MoeForCausalLM", "qwen3_moe", sliding_window=True, experts=True),
        Family("MixtralForCausalLM", "mixtral", sliding_window=True, experts=True),
        Family("GptOssForCausalLM", "gpt_oss", sliding_window=True, sinks=True, experts=True),
    )
}


def check_architecture(config: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        ModelError: its architecture is not proven, or its weights are quantized.
    """
    names = config.get("architectures") or ["none"]
    family = FAMILIES.get(names[0])
    if family is None or config.get("model_type") != family.model_type:
        raise ModelError(
            f"architecture {names[0]!r:.80} (model_type {config.get('model_type')!r:.80}) is not supported: "
            f"its output has not been proven against transformers. Supported: {', '.join(sorted(FAMILIES))}"
        )
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"the checkpoint is quantized ({method!r:.80}), which is not supported: "
            "use one in bfloat16 or float32, or a GGUF file (whose weights are expanded)"
        )
    return family


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model in memory.

    Raises:
        ModelError: it is none of the proven ones.
    """
    return check_architecture({"architectures": [type(model).__name__], "model_type": model.config.model_type})


def check_config(config: PretrainedConfig) -> None:
    """Refuses what the paged attention would compute wrongly.

    Raises:
        ModelError: with the reason.
    """
    for rope in _rope_parameters(config):
        rope_type = rope.get("rope_type", "default")
        if reason := LENGTH_DEPENDENT_ROPE.get(rope_type):
            raise ModelError(f"rope scaling {rope_type!r} is not supported: {reason}")
        if rope_type not in ROPE_TYPES:
            raise ModelError(f"rope scaling {rope_type!r:.80} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in LAYER_TYPES:
            raise ModelError(f"layers of type {layer_type!r:.80} are not supported; only {' and '.join(LAYER_TYPES)}")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise ModelError("a model whose attention is bidirectional cannot generate token by token")


def _rope_parameters(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """One entry for the model, or one per layer type where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]
