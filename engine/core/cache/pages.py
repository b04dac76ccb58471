"""The free list of KV pages. Knows no sequence, no prefix and no memory: a page is a number.

Who holds a page that is not free is the business of `kv.py`; there are no reference counts here.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferdbg.engine.errors import InferdbgError

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out pages 0 … num_pages - 1, the most recently freed first: its memory is the likeliest to be warm."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages.

        Raises:
            InferdbgError: fewer are free; nothing is taken. Callers ask `num_free` first.
        """
        if count > len(self._free):
            raise InferdbgError(f"{count} pages asked for, {len(self._free)} free")
        split = len(self._free) - count
        taken = self._free[split:]
        del self._free[split:]
        for page in taken:
            self._is_free[page] = 0
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back.

        Raises:
            InferdbgError: a page is free already: it had two owners.
        """
        for page in pages:
            if self._is_free[page]:
                raise InferdbgError(f"page {page} freed twice")
            self._is_free[page] = 1
            self._free.append(page)

    def free_pages(self) -> set[int]:
        """The free pages, for integrity checks.

        Raises:
            InferdbgError: the list and its flags disagree.
        """
        pages = set(self._free)
        flagged = {page for page, flag in enumerate(self._is_free) if flag}
        if len(pages) != len(self._free) or pages != flagged:
            raise InferdbgError("the free list names a page twice, or its flags disagree with it")
        return pages
