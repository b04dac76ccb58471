"""Tiny seeded models of every supported family, in memory: two or three layers, odd head groups, short windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from inferdbg.engine.core.model_info import ModelInfo

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,  # a tiny tied model repeats one token
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"]


def _rope(**values: Any) -> dict[str, Any]:
    return {"rope_theta": 10_000.0, **values}


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama-biased": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama-llama3": lambda: LlamaConfig(
        **COMMON,
        rope_parameters=_rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": lambda: LlamaConfig(
        **COMMON, rope_parameters=_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "llama-linear": lambda: LlamaConfig(**COMMON, rope_parameters=_rope(rope_type="linear", factor=4.0)),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=16),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen2-window": lambda: Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**COMMON),
    "phi3": lambda: Phi3Config(**{k: v for k, v in COMMON.items() if k != "head_dim"}, sliding_window=24),
    "gemma2": lambda: Gemma2Config(**COMMON, layer_types=MIXED, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, layer_types=MIXED, sliding_window=8, query_pre_attn_scalar=16),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss": lambda: GptOssConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, layer_types=MIXED
    ),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float64, attention: str = "eager") -> PreTrainedModel:
    """The model called `name`; the same weights at every call, up to the dtype. No parameter is a round number."""
    config = CONFIGS[name]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1) + 0.1 * torch.randn(parameter.shape))
    return model.to(dtype).eval()


def info_of(model: PreTrainedModel, eos_token_ids: frozenset[int] = frozenset()) -> ModelInfo:
    config = model.config
    return ModelInfo(
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eos_token_ids=eos_token_ids,
    )
