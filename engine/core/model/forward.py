"""The one seam between the runner and the paths that compute logits: the plain path and the fast ones."""

from __future__ import annotations

from typing import Protocol

import torch

from inferdbg.engine.core.runner import StepBatch

__all__ = ["Forward"]


class Forward(Protocol):
    """Computes logits for a step, reading and writing KV in the pool it was built with."""

    @property
    def name(self) -> str:
        """For the manifest: `plain`, `fast-numba`, …"""
        ...

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Writes K and V of the batch's tokens to their slots, returns logits (R, vocab) of `batch.logits_rows`.

        The dtype is the model's. The caller may keep the tensor until the next call only.
        """
        ...
