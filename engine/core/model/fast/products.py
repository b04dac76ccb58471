"""Matrix products with fixed weights, joined and packed once. Knows no model.

oneDNN lays weights out anew at every `F.linear` call; with few rows that costs as much as the product. Two operators
of torch keep the packed layout (`mkldnn::_reorder_linear_weight`, `mkldnn::_linear_pointwise`). They are private, so
they are tried once, and `F.linear` serves where they fail.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Product"]


class Product:
    """``y = x @ W.T + b`` where W stacks the weights of several linear layers of one input.

    x: (T, in), y: (T, sum of the layers' outputs), in the weights' dtype.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """The layers' own parameters become views of the stacked weight, so that it takes no memory of its own."""
        if len(layers) == 1:
            self.weight = layers[0].weight.detach()
        else:
            self.weight = torch.cat([layer.weight.detach() for layer in layers])
            parts = torch.split(self.weight, [layer.out_features for layer in layers])
            for layer, part in zip(layers, parts, strict=True):
                layer.weight.data = part
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.packed = _pack(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def _pack(weight: Tensor) -> Tensor | None:
    """Returns `weight` in oneDNN's own layout, or None where this torch or this CPU cannot use it."""
    if weight.dtype != torch.bfloat16:  # MKL serves float32 well from the ordinary layout
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        probe = torch.ones(1, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return packed
