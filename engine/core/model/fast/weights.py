"""Takes a transformers decoder apart into what the fast path computes with.

A model is accepted only when every part of it is one that the fast path knows; anything else gets None, never a
nearly right answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inferdbg.engine.core.model.families import ROPE_TYPES
from inferdbg.engine.core.model.fast.products import Product

__all__ = ["Decoder", "Layer", "read_decoder"]

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. `window`: a query sees that many positions, its own included; 0: all."""

    input_norm: Tensor  # (H,)
    qkv: Product  # H -> (Hq + 2 Hkv) * D, queries first
    query_norm: Tensor | None  # (D,)
    key_norm: Tensor | None  # (D,)
    output: Product  # Hq * D -> H
    post_norm: Tensor  # (H,)
    gate_up: Product  # H -> 2 F, gate first
    down: Product  # F -> H
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A whole decoder. `cos`, `sin`: (max positions, D / 2) float32, attention scaling included."""

    layers: tuple[Layer, ...]
    embedding: Tensor  # (vocab, H)
    final_norm: Tensor  # (H,)
    head: Product  # H -> vocab
    cos: Tensor
    sin: Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_decoder(model: PreTrainedModel, max_positions: int) -> Decoder | None:
    """Reads the weights of `model`; None where the fast path does not compute such a model."""
    config = model.config
    architecture = type(model).__name__
    if architecture not in FAMILIES or config.hidden_act != "silu":
        return None
    if config.rope_parameters["rope_type"] not in ROPE_TYPES:
        return None
    base: Any = model.model
    attention = base.layers[0].self_attn
    positions = torch.arange(max_positions)[None]
    cos, sin = base.rotary_emb(torch.empty(0, dtype=torch.float32), positions)
    half = attention.head_dim // 2
    if cos.shape[-1] != attention.head_dim:  # rope over a part of each head
        return None
    return Decoder(
        layers=tuple(_read_layer(layer) for layer in base.layers),
        embedding=base.embed_tokens.weight.detach(),
        final_norm=base.norm.weight.detach(),
        head=Product([model.lm_head]),
        cos=cos[0, :, :half].contiguous(),
        sin=sin[0, :, :half].contiguous(),
        eps=config.rms_norm_eps,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
    )


def _read_layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=Product([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=_weight(attention, "q_norm"),
        key_norm=_weight(attention, "k_norm"),
        output=Product([attention.o_proj]),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=Product([mlp.gate_proj, mlp.up_proj]),
        down=Product([mlp.down_proj]),
        window=_window(attention),
    )


def _weight(module: nn.Module, name: str) -> Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm.weight.detach()


def _window(attention: Any) -> int:
    if type(attention).__name__ == "MistralAttention":
        return attention.config.sliding_window or 0
    return getattr(attention, "sliding_window", None) or 0
