"""Makes `fast_driver` importable from the tests of this folder, and sets how many threads they use."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, since tiny steps only wait for others; two where a test's parameter asks for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)
