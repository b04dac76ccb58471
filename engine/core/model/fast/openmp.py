"""Runs compiled functions on torch's own OpenMP threads. Knows nothing of what they compute.

Two thread pools on the same cores wait for each other in busy loops: a product of torch followed by a loop on numba's
own OpenMP pool took 16 ms instead of 0.05. So the functions are compiled by numba and started through the OpenMP
library that torch has loaded, for 2 µs a call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from numba import cfunc

__all__ = ["ParallelKernel", "openmp_is_loaded"]

_SIGNATURE = "void(CPointer(int64))"
_SYMBOLS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")  # LLVM's OpenMP library has them too


def openmp_is_loaded() -> bool:
    """Whether the OpenMP library that torch has loaded can be called by name."""
    process = ctypes.CDLL(None)
    return all(hasattr(process, symbol) for symbol in _SYMBOLS)


class ParallelKernel:
    """A function compiled to be run by all threads at once, each doing its share.

    `function` takes a pointer to its `num_args` arguments, which are integers: counts and addresses. `options` are
    numba's. The code is cached on disk by numba, so only the first process on a machine compiles it.
    """

    def __init__(self, function: Callable[[Any], None], num_args: int, options: dict[str, Any]) -> None:
        try:
            self._code = cfunc(_SIGNATURE, cache=True, **options)(function)
        except RuntimeError:  # numba finds no folder that it may write to
            self._code = cfunc(_SIGNATURE, **options)(function)
        self._format = struct.Struct(f"{num_args}q")
        self._args = ctypes.create_string_buffer(self._format.size)
        self._start = ctypes.CDLL(None).GOMP_parallel
        self._start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._start.restype = None
        self._entry = (self._code.address, ctypes.addressof(self._args))

    def __call__(self, num_threads: int, *args: int) -> None:
        """Runs the function with `args` on `num_threads` threads; returns when all have ended."""
        self._format.pack_into(self._args, 0, *args)
        self._start(*self._entry, num_threads, 0)
