"""The fast path of dense Llama-like models on a CPU: joined and prepacked products, fused kernels, pages read in place.

It computes what the plain path computes, beside it and tested against it, sharing its weights. It knows no sequence
and no sampling.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.model.fast.forward import FastForward
from inferdbg.engine.core.model.fast.kernels import choose_kernels
from inferdbg.engine.core.model.fast.weights import read_decoder
from inferdbg.engine.core.model.forward import Forward
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.model_info import ModelInfo

__all__ = ["make_fast_forward"]


def make_fast_forward(model: PreTrainedModel, info: ModelInfo, pool: KVPool, config: CoreConfig) -> Forward | None:
    """Returns the fast path of `model`, or None where there is none for its family, device, dtype or settings.

    The parameters of `model` keep their values; a packed copy of them is made (once more their size in memory).
    """
    if config.device != "cpu" or config.dtype not in ("bfloat16", "float32") or config.batch_invariant:
        return None
    with torch.no_grad():
        decoder = read_decoder(model, config.max_model_len or info.max_positions)
        if decoder is None:
            return None
        return FastForward(decoder, pool, choose_kernels(decoder, pool))
