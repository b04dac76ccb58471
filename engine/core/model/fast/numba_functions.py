"""The bodies of the compiled kernels, on bfloat16 in memory and float32 in registers. Knows no tensor.

Every function is compiled by `ParallelKernel` and run by all threads at once. Its arguments arrive as integers:
addresses of arrays and counts. bfloat16 is the upper half of a float32, so it is read as uint16 and shifted.
Helpers stand in this file too: numba's disk cache looks for changes in a function's own file only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit
from numba import types as numba_types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

__all__ = ["COMPILE_OPTIONS", "add_norm", "attend", "gate", "multiply_row", "norm", "rotate_and_store", "softmax_chunk"]

# numba is typed in parts, and what these say is not what compiled code sees
types: Any = numba_types
arguments: Any = to_fixed_tuple

# Sums may be reordered, but not a number stays not a number; numpy's error model divides without asking for zero.
# Both let loops vectorise.
COMPILE_OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
_Function = TypeVar("_Function", bound=Callable[..., Any])

_thread_num = types.ExternalFunction("omp_get_thread_num", types.int32())
_num_threads = types.ExternalFunction("omp_get_num_threads", types.int32())


def _compiled(function: _Function) -> _Function:
    compiled: Any = njit(**COMPILE_OPTIONS)(function)
    return cast(_Function, compiled)


def _make_pointer(_context: Any, address: Any, dtype: Any) -> Any:
    """The integer `address` as a pointer to `dtype`."""
    pointer = types.CPointer(dtype.dtype)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(address, dtype), codegen


def _make_prefetch(_context: Any, address: Any) -> Any:
    """Asks for the cache line at the integer `address`."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], signature)
        read, keep, data = flag(0), flag(3), flag(1)
        builder.call(prefetch, [builder.inttoptr(args[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(address), codegen


_pointer: Any = intrinsic(_make_pointer)
_prefetch_line: Any = intrinsic(_make_prefetch)


@_compiled
def _bf16(address: Any, shape: Any) -> Any:
    return carray(_pointer(address, np.uint16), shape)


@_compiled
def _widen(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@_compiled
def _narrow(value: Any) -> Any:
    """Rounds to nearest, ties to even."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@_compiled
def _share(count: Any) -> Any:
    """The range of `count` items that is this thread's."""
    thread, threads = _thread_num(), _num_threads()
    return count * thread // threads, count * (thread + 1) // threads


@_compiled
def _exp(x: Any) -> Any:
    """exp(x) in float32 with a relative error below 1e-6, in a form that compilers vectorise; clamped to [-87, 88].

    x = n ln 2 + r; 2^n is built as bits, e^r is Cephes' polynomial (expf).
    """
    if x < np.float32(-87.0):
        x = np.float32(-87.0)
    if x > np.float32(88.0):
        x = np.float32(88.0)
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1.0)) * power


@_compiled
def _scale_of(x: Any, eps: Any) -> Any:
    """1 / RMS of a row of float32."""
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i] * x[i]
    return np.float32(1.0) / np.sqrt(total / np.float32(x.size) + eps)


@_compiled
def _as_float(bits: Any) -> Any:
    return np.float32(np.int64(bits).view(np.float64))


def norm(args: Any) -> None:
    """x (rows, width), weight (width,), out (rows, width), bits of eps."""
    x_at, weight_at, out_at, rows, width, eps = arguments(carray(args, 6), 6)
    x, weight, out = _bf16(x_at, (rows, width)), _bf16(weight_at, width), _bf16(out_at, (rows, width))
    row = np.empty(width, np.float32)
    first, last = _share(rows)
    for t in range(first, last):
        for i in range(width):
            row[i] = _widen(x[t, i])
        scale = _scale_of(row, _as_float(eps))
        for i in range(width):
            out[t, i] = _narrow(row[i] * scale * _widen(weight[i]))


def add_norm(args: Any) -> None:
    """residual, x (rows, width), weight (width,), out (rows, width), bits of eps."""
    residual_at, x_at, weight_at, out_at, rows, width, eps = arguments(carray(args, 7), 7)
    residual, x = _bf16(residual_at, (rows, width)), _bf16(x_at, (rows, width))
    weight, out = _bf16(weight_at, width), _bf16(out_at, (rows, width))
    row = np.empty(width, np.float32)
    first, last = _share(rows)
    for t in range(first, last):
        for i in range(width):
            row[i] = _widen(residual[t, i]) + _widen(x[t, i])
        for i in range(width):
            residual[t, i] = _narrow(row[i])
        for i in range(width):
            row[i] = _widen(residual[t, i])
        scale = _scale_of(row, _as_float(eps))
        for i in range(width):
            out[t, i] = _narrow(row[i] * scale * _widen(weight[i]))


def gate(args: Any) -> None:
    """gate_up (rows, 2 * width), out (rows, width)."""
    gate_up_at, out_at, rows, width = arguments(carray(args, 4), 4)
    gate_up, out = _bf16(gate_up_at, (rows, 2, width)), _bf16(out_at, (rows, width))
    first, last = _share(rows)
    for t in range(first, last):
        for i in range(width):
            x = _widen(gate_up[t, 0, i])
            out[t, i] = _narrow(x / (np.float32(1.0) + _exp(-x)) * _widen(gate_up[t, 1, i]))


def multiply_row(args: Any) -> None:
    """weight (width, depth), x (depth,), bias (width,) or address 0, out (width,)."""
    weight_at, x_at, bias_at, out_at, width, depth = arguments(carray(args, 6), 6)
    weight, x, out = _bf16(weight_at, (width, depth)), _bf16(x_at, depth), _bf16(out_at, width)
    row = np.empty(depth, np.float32)
    for i in range(depth):
        row[i] = _widen(x[i])
    first, last = _share(width)
    for n in range(first, last):
        total = np.float32(0.0)
        for i in range(depth):
            total += _widen(weight[n, i]) * row[i]
        if bias_at:
            total += _widen(_bf16(bias_at, width)[n])
        out[n] = _narrow(total)


def rotate_and_store(args: Any) -> None:
    """qkv (rows, heads + 2 * kv_heads, dim); keys, values (pages, kv_heads, page_size, dim); cos, sin (·, dim / 2)."""
    (
        qkv_at, positions_at, slots_at, cos_at, sin_at, query_norm_at, key_norm_at, keys_at, values_at,
        rows, heads, kv_heads, dim, page_size, num_pages, num_positions, eps,
    ) = arguments(carray(args, 17), 17)  # fmt: skip
    half = dim // 2
    qkv = _bf16(qkv_at, (rows, heads + 2 * kv_heads, 2, half))
    positions, slots = carray(_pointer(positions_at, np.int64), rows), carray(_pointer(slots_at, np.int64), rows)
    cos_table = carray(_pointer(cos_at, np.float32), (num_positions, half))
    sin_table = carray(_pointer(sin_at, np.float32), (num_positions, half))
    keys = _bf16(keys_at, (num_pages, kv_heads, page_size, 2, half))
    values = _bf16(values_at, (num_pages, kv_heads, page_size, 2, half))
    head = np.empty((2, half), np.float32)
    first, last = _share(rows)
    for t in range(first, last):
        cos, sin = cos_table[positions[t]], sin_table[positions[t]]
        page, offset = slots[t] // page_size, slots[t] % page_size
        for h in range(heads + kv_heads):
            for part in range(2):
                for i in range(half):
                    head[part, i] = _widen(qkv[t, h, part, i])
            norm_at = query_norm_at if h < heads else key_norm_at
            if norm_at:
                weight = _bf16(norm_at, (2, half))
                scale = _scale_of(head.reshape(dim), _as_float(eps))
                for part in range(2):
                    for i in range(half):
                        head[part, i] *= scale * _widen(weight[part, i])
            for i in range(half):
                qkv[t, h, 0, i] = _narrow(head[0, i] * cos[i] - head[1, i] * sin[i])
                qkv[t, h, 1, i] = _narrow(head[1, i] * cos[i] + head[0, i] * sin[i])
        for h in range(kv_heads):
            for part in range(2):
                for i in range(half):
                    keys[page, h, offset, part, i] = qkv[t, heads + h, part, i]
                    values[page, h, offset, part, i] = qkv[t, heads + kv_heads + h, part, i]


@_compiled
def _prefetch(address: Any, num_bytes: Any) -> Any:
    for offset in range(0, num_bytes, 64):
        _prefetch_line(address + offset)


@_compiled
def _dot_rows(query: Any, keys: Any, scores: Any) -> Any:
    """query (dim,) float32, keys (n, dim) -> scores (n,)."""
    for j in range(scores.size):
        total = np.float32(0.0)
        for i in range(query.size):
            total += query[i] * _widen(keys[j, i])
        scores[j] = total


@_compiled
def _softmax(scores: Any) -> Any:
    highest, total = scores[0], np.float32(0.0)
    for j in range(scores.size):
        if scores[j] > highest:
            highest = scores[j]
    for j in range(scores.size):
        scores[j] = _exp(scores[j] - highest)
        total += scores[j]
    for j in range(scores.size):
        scores[j] /= total


@_compiled
def _add_weighted_rows(weights: Any, values: Any, sums: Any) -> Any:
    """weights (n,), values (n, dim): adds their product to sums (dim,), four rows at a time to spare loads of sums."""
    tiled = weights.size // 4 * 4
    for j in range(0, tiled, 4):
        for i in range(sums.size):
            sums[i] += (weights[j] * _widen(values[j, i]) + weights[j + 1] * _widen(values[j + 1, i])) + (
                weights[j + 2] * _widen(values[j + 2, i]) + weights[j + 3] * _widen(values[j + 3, i])
            )
    for j in range(tiled, weights.size):
        for i in range(sums.size):
            sums[i] += weights[j] * _widen(values[j, i])


def softmax_chunk(args: Any) -> None:
    """scores (heads, rows, width) float32 -> out, the same shape: softmax of the scaled scores over what a row sees.

    Row r stands at position `first_row + r` of its sequence, column c at `first_column + c`.
    """
    (
        scores_at, out_at, heads, rows, width, dim, first_row, first_column, window,
    ) = arguments(carray(args, 9), 9)  # fmt: skip
    scores = carray(_pointer(scores_at, np.float32), (heads * rows, width))
    out = _bf16(out_at, (heads * rows, width))
    root = np.float32(1.0) / np.sqrt(np.float32(dim))
    first, last = _share(heads * rows)
    for t in range(first, last):
        end = first_row + t % rows + 1 - first_column
        start = max(0, end - window) if window else 0
        seen = scores[t, start:end]
        for j in range(seen.size):
            seen[j] *= root
        _softmax(seen)
        out[t, :start] = 0
        for j in range(seen.size):
            out[t, start + j] = _narrow(seen[j])
        out[t, end:] = 0


def attend(args: Any) -> None:
    """qkv (·, row_width), queries first; keys, values (pages, kv_heads, page_size, dim); out (·, heads, dim);
    page_tables (rows, table_width); context_lens (rows,).

    An item is the group of query heads of one KV head in one row. KV comes from memory by scattered pages, and the
    wait would be longer than the work: an item's V is fetched while its K is read, the next item's K while its V is.
    """
    (
        qkv_at, keys_at, values_at, out_at, tables_at, lens_at,
        rows, row_width, heads, kv_heads, dim, page_size, num_pages, table_width, window,
    ) = arguments(carray(args, 15), 15)  # fmt: skip
    qkv, out = _bf16(qkv_at, (rows, row_width)), _bf16(out_at, (rows, heads, dim))
    keys = _bf16(keys_at, (num_pages, kv_heads, page_size, dim))
    values = _bf16(values_at, (num_pages, kv_heads, page_size, dim))
    tables = carray(_pointer(tables_at, np.int64), (rows, table_width))
    lens = carray(_pointer(lens_at, np.int64), rows)
    group, root = heads // kv_heads, np.float32(1.0) / np.sqrt(np.float32(dim))
    query, sums = np.empty((group, dim), np.float32), np.empty((group, dim), np.float32)
    scores = np.empty((group, table_width * page_size), np.float32)
    page_bytes = page_size * dim * 2  # of one head
    first_item, last_item = _share(rows * kv_heads)
    for item in range(first_item, last_item):
        b, h = item // kv_heads, item % kv_heads
        end = lens[b]
        start = max(0, end - window) if window else 0
        pages = range(start // page_size, (end - 1) // page_size + 1)
        for g in range(group):
            for i in range(dim):
                query[g, i] = _widen(qkv[b, (h * group + g) * dim + i]) * root
        sums[:] = 0.0
        for p in pages:
            first, last = max(start, p * page_size), min(end, (p + 1) * page_size)
            key = keys[tables[b, p], h, first - p * page_size : last - p * page_size]
            _prefetch(values_at + (tables[b, p] * kv_heads + h) * page_bytes, page_bytes)
            for g in range(group):
                _dot_rows(query[g], key, scores[g, first:last])
        for g in range(group):
            _softmax(scores[g, start:end])
        for p in pages:
            first, last = max(start, p * page_size), min(end, (p + 1) * page_size)
            value = values[tables[b, p], h, first - p * page_size : last - p * page_size]
            if item + 1 < last_item:
                next_page = tables[(item + 1) // kv_heads, p] * kv_heads + (item + 1) % kv_heads
                _prefetch(keys_at + next_page * page_bytes, page_bytes)
            for g in range(group):
                _add_weighted_rows(scores[g, first:last], value, sums[g])
        for g in range(group):
            for i in range(dim):
                out[b, h * group + g, i] = _narrow(sums[g, i])
