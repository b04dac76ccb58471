"""Mixtures of experts in constant shapes, for batch invariance. Knows no routing: the router's choice comes in.

transformers' own implementations give each expert the tokens that chose it, so the shape of its products depends on
the company. Here every expert that anyone chose sees all rows, and rows that did not choose it keep what they have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

__all__ = ["use_fixed_shape_experts"]

EXPERTS_NAME = "inferdbg_fixed_shape"


def use_fixed_shape_experts(model: PreTrainedModel) -> None:
    """Sets the experts' implementation of `model` for good."""
    ExpertsInterface.register(EXPERTS_NAME, _fixed_shape_experts)
    model.set_experts_implementation(EXPERTS_NAME)


def _fixed_shape_experts(
    self: Any,  # the experts module: weights of all experts in one tensor, and its own gate
    hidden_states: torch.Tensor,  # (T, C)
    top_k_index: torch.Tensor,  # (T, k)
    top_k_weights: torch.Tensor,  # (T, k)
) -> torch.Tensor:
    """Adds the experts up in ascending order, in the dtype of the hidden states, as transformers' loop does."""
    out = torch.zeros_like(hidden_states)
    for expert in torch.unique(top_k_index).tolist():
        choices = top_k_index == expert  # (T, k), at most one per row
        weight = (top_k_weights * choices).sum(dim=-1, keepdim=True)
        up = _product(self, hidden_states, self.gate_up_proj[expert], "gate_up_proj_bias", expert)
        down = _product(self, self._apply_gate(up), self.down_proj[expert], "down_proj_bias", expert)
        out = torch.where(choices.any(dim=-1, keepdim=True), out + (down * weight).to(out.dtype), out)
    return out


def _product(module: Any, rows: torch.Tensor, weight: torch.Tensor, bias_name: str, expert: int) -> torch.Tensor:
    product = rows @ weight if module.is_transposed else functional.linear(rows, weight)
    return product + getattr(module, bias_name)[expert] if module.has_bias else product
