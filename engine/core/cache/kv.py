"""Which page belongs to whom: joins the free list and the prefix cache, and fills in each sequence's page table.
Knows nothing of steps, budgets or what is in a page.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable

from inferdbg.engine.core.cache.pages import PageAllocator
from inferdbg.engine.core.cache.radix import Node, RadixCache
from inferdbg.engine.core.sequence import Sequence
from inferdbg.engine.errors import InferdbgError

__all__ = ["KVCacheManager", "PageKeys", "token_page_keys"]

PageKeys = Callable[[Sequence, int, int], list[Hashable]]
"""Keys for pages [first, last) of a sequence, all of them full."""


def token_page_keys(page_size: int) -> PageKeys:
    """Keys made of token ids: the id itself where a page holds one token, else a tuple of `page_size` ids."""

    def keys(seq: Sequence, first: int, last: int) -> list[Hashable]:
        ids = seq.token_ids
        if page_size == 1:
            return list(ids[first:last])
        return [tuple(ids[i : i + page_size]) for i in range(first * page_size, last * page_size, page_size)]

    return keys


class KVCacheManager:
    """Every page has exactly one owner at any time:

        free list ──grow──> a sequence ──publish──> prefix cache ──evict──> free list
            ^                   │ private pages          ^  │
            └────── release ────┘                        └──┘ locked by the sequences that use it

        seq.pages   [ 0 … num_shared )             [ num_shared … len(pages) )
                    in the cache, locked by the    private: this sequence alone reads and writes them
                    sequence: read, never written
    In counts:      used = private + locked        cached = in the cache and locked by nobody
                    free + used + cached == num_pages

    `publish` moves a sequence's full, computed pages from private to shared. Where the cache has a page of the same
    content (two sequences computed one prefix side by side), the first stays, the sequence goes on with that one, and
    its own copy is freed at once. So a path exists once however many sequences walk it.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_cache: bool = True, page_keys: PageKeys | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.num_evicted = 0  # pages evicted so far
        self._keys = page_keys if page_keys is not None else token_page_keys(page_size)
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixCache()
        self._held: dict[int, tuple[Sequence, Node]] = {}  # by seq_id: the node that ends its shared pages

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        return self._tree.num_unlocked

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def reads_cache(self, seq: Sequence) -> bool:
        """Whether an admission of `seq` looks its prefix up."""
        return self.prefix_cache and not seq.needs_prompt_scores

    def acquire(self, seq: Sequence) -> int:
        """Gives a sequence without pages the cached pages of its longest prefix; returns the tokens in them.

        Never all of its tokens: the last one must be computed to have logits to sample from.
        """
        node = self._tree.root(seq.request.cache_salt)
        pages: list[int] = []
        if self.reads_cache(seq):
            keys = self._keys(seq, 0, (len(seq.token_ids) - 1) // self.page_size)
            node, pages = self._tree.match(keys, seq.request.cache_salt)
        self._tree.lock(node)
        self._held[seq.seq_id] = (seq, node)
        seq.pages = array("q", pages)
        seq.num_shared = len(pages)
        seq.num_cached = seq.num_computed = len(pages) * self.page_size
        return seq.num_cached

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Adds pages, evicting if need be, until `seq` has room for `num_tokens` tokens in all.

        False, and nothing changed, where free and evictable pages together are too few.
        """
        missing = self.pages_for(num_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        shortage = missing - self._allocator.num_free
        if shortage > 0:
            if shortage > self._tree.num_unlocked:
                return False
            evicted = self._tree.evict(shortage)
            self._allocator.free(evicted)
            self.num_evicted += len(evicted)
        seq.pages.extend(self._allocator.allocate(missing))
        return True

    def publish(self, seq: Sequence) -> None:
        """Puts the full pages whose KV is computed into the prefix cache, for others to find."""
        num_full = seq.num_computed // self.page_size
        first = seq.num_shared
        if not self.prefix_cache or num_full <= first:
            return
        _, held = self._held[seq.seq_id]
        inserted = self._tree.insert(held, self._keys(seq, first, num_full), seq.pages[first:num_full])
        self._tree.lock(inserted.node)
        self._tree.unlock(held)
        self._held[seq.seq_id] = (seq, inserted.node)
        self._allocator.free(inserted.duplicates)
        seq.pages[first:num_full] = array("q", inserted.pages)
        seq.num_shared = num_full

    def release(self, seq: Sequence, *, publish: bool) -> None:
        """Takes all pages from a sequence, if it has any. With `publish`, what it computed stays in the cache."""
        held = self._held.get(seq.seq_id)
        if held is None:
            return
        if publish:
            self.publish(seq)
        _, node = self._held.pop(seq.seq_id)
        self._tree.unlock(node)
        self._allocator.free(seq.pages[seq.num_shared :])
        seq.pages = array("q")
        seq.num_shared = seq.num_computed = 0

    def holders(self) -> set[int]:
        """The ids of the sequences that have pages."""
        return set(self._held)

    def check_integrity(self) -> None:
        """Counts every page from the ground up. Linear in pages: for tests, and for idle moments in production.

        Raises:
            InferdbgError: a page is lost, has two owners, or a count is wrong; the message says which.
        """
        self._tree.check_integrity([node for _, node in self._held.values()])
        owners: dict[int, str] = dict.fromkeys(self._allocator.free_pages(), "the free list")
        num_used = 0
        for node in self._tree.nodes():
            for page in node.pages:
                _own(owners, page, "the prefix cache")
            num_used += len(node.pages) if node.num_locks else 0
        for seq, node in self._held.values():
            path = _path_pages(node)
            if list(seq.pages[: seq.num_shared]) != path:
                raise InferdbgError(f"the shared pages of sequence {seq.seq_id} are not those of its path in the cache")
            if seq.num_computed > len(seq.pages) * self.page_size:
                raise InferdbgError(f"sequence {seq.seq_id} has computed more tokens than its pages hold")
            for page in seq.pages[seq.num_shared :]:
                _own(owners, page, f"sequence {seq.seq_id}")
            num_used += len(seq.pages) - seq.num_shared
        if self.num_free + num_used + self.num_cached != self.num_pages or len(owners) != self.num_pages:
            raise InferdbgError(
                f"{self.num_free} free + {num_used} used + {self.num_cached} cached pages "
                f"({len(owners)} with an owner) are not the {self.num_pages} there are"
            )


def _own(owners: dict[int, str], page: int, owner: str) -> None:
    if page in owners:
        raise InferdbgError(f"page {page} belongs to {owners[page]} and to {owner}")
    owners[page] = owner


def _path_pages(node: Node | None) -> list[int]:
    runs: list[list[int]] = []
    while node is not None:
        runs.append(node.pages)
        node = node.parent
    return [page for run in reversed(runs) for page in run]
