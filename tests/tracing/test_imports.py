"""What a process pays for that only needs a part: imports are looked at in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("catalog", {"pyarrow", "prometheus_client", "opentelemetry", "numpy"}),
        ("session", {"torch", "transformers", "pyarrow", "opentelemetry", "grpc"}),
        ("reader", {"torch", "transformers", "tokenizers", "opentelemetry", "grpc", "prometheus_client"}),
        ("writing", {"torch", "transformers", "grpc"}),
    ],
)
def test_a_part_imports_only_what_it_needs(module, absent):
    script = f"import sys, inferdbg.tracing.{module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not absent & set(done.stdout.split())
