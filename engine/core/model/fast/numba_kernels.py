"""`Kernels` compiled by numba: bfloat16 only, on torch's OpenMP threads, KV pages read in place.

Needs numba and an OpenMP library that can be called by name; importing this module without numba fails.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inferdbg.engine.core.model.fast import numba_functions as functions
from inferdbg.engine.core.model.fast.chunk import query_key_value
from inferdbg.engine.core.model.fast.openmp import ParallelKernel, openmp_is_loaded
from inferdbg.engine.core.model.fast.plan import Chunk, StepPlan
from inferdbg.engine.core.model.fast.products import Product
from inferdbg.engine.core.model.fast.weights import Decoder
from inferdbg.engine.core.model.kv_pool import KVPool

__all__ = ["NumbaKernels", "openmp_is_loaded"]

_TILE_ROWS = 128  # query rows of a prefill chunk whose scores are held at once,
_TILE_SCORES = 1 << 22  # fewer where the context is so long that there would be more scores than this


class NumbaKernels:
    """The kernels of one decoder over one pool. Compiles when made, a few seconds once per machine."""

    name = "numba"

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self.decoder = decoder
        self.pool = pool
        self._eps = struct.unpack("q", struct.pack("d", decoder.eps))[0]  # its bits: arguments are integers
        self._norm = _compile(functions.norm, 6)
        self._add_norm = _compile(functions.add_norm, 7)
        self._gate = _compile(functions.gate, 4)
        self._multiply_row = _compile(functions.multiply_row, 6)
        self._rotate_and_store = _compile(functions.rotate_and_store, 17)
        self._attend = _compile(functions.attend, 15)
        self._softmax_chunk = _compile(functions.softmax_chunk, 9)

    def multiply(self, product: Product, x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            return product(x)
        weight, bias = product.weight, _address(product.bias)
        out = x.new_empty(1, weight.shape[0])
        pointers = (weight.data_ptr(), x.data_ptr(), bias, out.data_ptr())
        self._multiply_row(torch.get_num_threads(), *pointers, *weight.shape)
        return out

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._norm(_threads(x), x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, self._eps)
        return out

    def add_norm(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        pointers = (residual.data_ptr(), x.data_ptr(), weight.data_ptr(), out.data_ptr())
        self._add_norm(_threads(x), *pointers, *x.shape, self._eps)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._gate(_threads(gate_up), gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def rotate_and_store(self, qkv: Tensor, layer: int, plan: StepPlan) -> None:
        decoder, pool, weights = self.decoder, self.pool, self.decoder.layers[layer]
        self._rotate_and_store(
            _threads(qkv),
            qkv.data_ptr(),
            plan.positions.ctypes.data,
            plan.slots.ctypes.data,
            decoder.cos.data_ptr(),
            decoder.sin.data_ptr(),
            _address(weights.query_norm),
            _address(weights.key_norm),
            pool.keys[layer].data_ptr(),
            pool.values[layer].data_ptr(),
            qkv.shape[0],
            decoder.num_heads,
            decoder.num_kv_heads,
            decoder.head_dim,
            pool.page_size,
            pool.keys[layer].shape[0],
            decoder.cos.shape[0],
            self._eps,
        )

    def attend(self, qkv: Tensor, layer: int, plan: StepPlan, out: Tensor) -> None:
        decoder, pool = self.decoder, self.pool
        self._attend(
            torch.get_num_threads(),
            qkv.data_ptr(),
            pool.keys[layer].data_ptr(),
            pool.values[layer].data_ptr(),
            out.data_ptr(),
            plan.page_tables.ctypes.data,
            plan.context_lens.ctypes.data,
            plan.num_decodes,
            qkv.shape[1],
            decoder.num_heads,
            decoder.num_kv_heads,
            decoder.head_dim,
            pool.page_size,
            pool.keys[layer].shape[0],
            plan.page_tables.shape[1],
            decoder.layers[layer].window,
        )

    def attend_chunk(self, qkv: Tensor, layer: int, chunk: Chunk, out: Tensor) -> None:
        query, key, value = query_key_value(qkv, layer, chunk, self.decoder, self.pool)
        kv_heads, group, rows, dim = query.shape
        query, keys = query.float(), key.float().transpose(1, 2)  # scores rounded to bfloat16 would be too coarse
        window, offset = self.decoder.layers[layer].window, chunk.context_len - rows
        tile = max(16, min(_TILE_ROWS, _TILE_SCORES // (kv_heads * group * chunk.context_len)))
        attended = out[chunk.start : chunk.end].view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
        for first in range(0, rows, tile):
            last = min(first + tile, rows)
            end = offset + last
            start = max(0, offset + first + 1 - window) if window else 0
            part = query[:, :, first:last].flatten(1, 2)  # (Hkv, G * tile, D)
            scores = torch.matmul(part, keys[:, :, start:end])
            weights = torch.empty_like(scores, dtype=value.dtype)
            self._softmax_chunk(
                torch.get_num_threads(),
                scores.data_ptr(),
                weights.data_ptr(),
                kv_heads * group,
                last - first,
                end - start,
                dim,
                offset + first,
                start,
                window,
            )
            tile_out = torch.matmul(weights, value[:, start:end])
            attended[:, :, first:last] = tile_out.view(kv_heads, group, last - first, dim)


def _compile(function: Callable[[Any], None], num_args: int) -> ParallelKernel:
    return ParallelKernel(function, num_args, functions.COMPILE_OPTIONS)


def _threads(x: Tensor) -> int:
    """A single row is too little work to wake other threads for."""
    return 1 if x.shape[0] == 1 else torch.get_num_threads()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
