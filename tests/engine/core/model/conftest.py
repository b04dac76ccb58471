"""Makes the helpers of this folder importable from its tests."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny models lose time to more threads."""
    torch.set_num_threads(1)
