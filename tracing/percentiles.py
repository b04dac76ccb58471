"""Percentiles of many values in bounded memory: exact up to a limit, then to one part in two thousand."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PERCENTILES", "Distribution"]

PERCENTILES = (50, 95, 99)
_EXACT = 1_000_000
_STEPS_PER_E = 1000  # logarithmic bins of 0.1 % width: an answer is off by at most half of that


class Distribution:
    """Non-negative durations in ns; asked for in seconds. Percentiles interpolate linearly, as numpy's default does."""

    def __init__(self) -> None:
        self._values = array("q")
        self._bins: Counter[int] | None = None

    def __len__(self) -> int:
        return len(self._values) if self._bins is None else self._bins.total()

    def add(self, values: npt.NDArray[np.int64]) -> None:
        values = np.maximum(values, 0)
        if self._bins is None:
            self._values.extend(values.tolist())
            if len(self._values) <= _EXACT:
                return
            values = np.array(self._values, dtype=np.int64)
            self._values = array("q")
            self._bins = Counter()
        bins = np.rint(np.log(np.maximum(values, 1)) * _STEPS_PER_E).astype(np.int64)
        found, counts = np.unique(bins, return_counts=True)
        self._bins.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def percentiles(self) -> dict[str, float | None]:
        """Seconds by name (`p50`, …); None where there is no value."""
        if not len(self):
            return {f"p{p}": None for p in PERCENTILES}
        if self._bins is None:
            found: Any = np.percentile(np.array(self._values, dtype=np.float64), PERCENTILES)
            return {f"p{p}": float(ns) / 1e9 for p, ns in zip(PERCENTILES, found, strict=True)}
        return {f"p{p}": self._from_bins(p) for p in PERCENTILES}

    def _from_bins(self, percent: float) -> float:
        assert self._bins is not None
        rank = percent / 100 * (self._bins.total() - 1)
        seen = 0
        edge = 0
        for edge in sorted(self._bins):
            seen += self._bins[edge]
            if seen > rank:
                break
        return math.exp(edge / _STEPS_PER_E) / 1e9
