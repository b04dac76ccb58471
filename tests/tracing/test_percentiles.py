from __future__ import annotations

import numpy as np
import pytest

from inferdbg.tracing import percentiles
from inferdbg.tracing.percentiles import Distribution

VALUES = (np.random.default_rng(3).lognormal(17, 1.5, 20_000)).astype(np.int64)


def expected():
    return {f"p{p}": float(np.percentile(VALUES, p)) / 1e9 for p in (50, 95, 99)}


def test_few_values_are_exact():
    distribution = Distribution()
    for part in np.array_split(VALUES, 7):
        distribution.add(part)
    assert distribution.percentiles() == pytest.approx(expected(), rel=1e-12)


def test_many_values_stay_within_half_a_bin_and_bounded(monkeypatch):
    monkeypatch.setattr(percentiles, "_EXACT", 5000)
    distribution = Distribution()
    for part in np.array_split(VALUES, 7):
        distribution.add(part)
    assert len(distribution) == len(VALUES)
    assert distribution.percentiles() == pytest.approx(expected(), rel=2e-3)
    assert len(distribution._values) == 0


def test_nothing_has_no_percentile():
    assert Distribution().percentiles() == {"p50": None, "p95": None, "p99": None}
