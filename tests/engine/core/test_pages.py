import random

import pytest

from inferdbg.engine.core.cache.pages import PageAllocator
from inferdbg.engine.errors import InferdbgError


def test_pages_are_handed_out_once_until_they_come_back() -> None:
    pages, rng, held = PageAllocator(20), random.Random(0), set[int]()
    for _ in range(500):
        if held and rng.random() < 0.5:
            back = rng.sample(sorted(held), rng.randint(1, len(held)))
            pages.free(back)
            held -= set(back)
        else:
            taken = pages.allocate(rng.randint(0, pages.num_free))
            assert not held & set(taken)
            held |= set(taken)
        assert pages.num_free == 20 - len(held)
        assert pages.free_pages() == set(range(20)) - held


def test_the_last_page_freed_is_the_first_to_go_out() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(3) == [2, 1, 0]
    pages.free([1])
    assert pages.allocate(1) == [1]


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    pages = PageAllocator(3)
    with pytest.raises(InferdbgError, match="4 pages asked for, 3 free"):
        pages.allocate(4)
    assert pages.num_free == 3


def test_a_page_cannot_be_freed_twice() -> None:
    pages = PageAllocator(3)
    (page,) = pages.allocate(1)
    pages.free([page])
    with pytest.raises(InferdbgError, match=f"page {page} freed twice"):
        pages.free([page])
