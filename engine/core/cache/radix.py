"""The prefix cache: a compressed radix tree from page keys to pages. Knows no token, sequence or model.

A page key is any hashable that stands for the content of one page: a tuple of token ids, a bare token id where a page
holds one token, or a page's hash from a trace. A path from a root spells a prefix; since attention is causal, the KV
of a page is decided by the path that leads to it, so a path is looked up, never a page alone.

    root(salt) ─[a b c]─┬─[d e]     edges hold runs of keys with their pages; a run is split where
                        └─[x]       two prefixes part, or where a match ends inside it

Whoever uses a path locks its last node, which locks all the way up. What nobody locks may be evicted, the least
recently used leaf first and its last pages first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from inferdbg.engine.errors import InferdbgError

__all__ = ["Insertion", "Node", "RadixCache"]


@dataclass(slots=True, eq=False)
class Node:
    """One edge and the branching point at its end. `pages[i]` holds the KV that `keys[i]` stands for."""

    keys: list[Hashable]
    pages: list[int]
    parent: Node | None
    serial: int  # breaks ties between equal times, by age
    last_used: int = 0
    num_locks: int = 0  # of this node and of all below it: a lock counts along its whole path
    is_queued: bool = False  # has an entry in the eviction heap (never two)
    salt: str | None = None  # of a root
    children: dict[Hashable, Node] = field(default_factory=dict)  # by first key


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of the pages offered to the tree."""

    node: Node  # where the inserted path ends
    pages: list[int]  # the tree's page for each key offered
    duplicates: list[int]  # pages offered that the tree did not take, for it has others with the same content


class RadixCache:
    """Prefixes by salt; requests with different salts never see each other's pages.

    `clock` gives non-decreasing integers, the time of use for LRU; by default a counter.
    A node returned by `match` or `insert` stays valid while it is locked, whatever is split or evicted meanwhile.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock if clock is not None else itertools.count(1).__next__
        self._serials = itertools.count()
        self._roots: dict[str | None, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # of unlocked leaves; entries may be out of date
        self.num_pages = 0  # in the tree
        self.num_unlocked = 0  # of them, those nobody locks: all of these can be evicted

    def root(self, salt: str | None = None) -> Node:
        """The empty prefix of a salt."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node([], [], None, next(self._serials), salt=salt)
        return node

    def match(self, keys: Sequence[Hashable], salt: str | None = None) -> tuple[Node, list[int]]:
        """The longest cached prefix of `keys`: the node where it ends, and its pages. Marks the path as used."""
        node, pages = self._descend(self.root(salt), keys)
        self._touch(node)
        return node, pages

    def insert(self, below: Node, keys: Sequence[Hashable], pages: Sequence[int]) -> Insertion:
        """Adds pages under `below`, which the caller has locked (or which is a root). Marks the path as used.

        Pages of keys that are there already stay the caller's and are returned as duplicates; the tree keeps its
        own, for others may be reading them. The rest now belong to the tree.
        """
        node, kept = self._descend(below, keys)
        duplicates = [page for page, ours in zip(pages, kept, strict=False) if page != ours]
        num_kept = len(kept)
        if num_kept < len(keys):
            leaf = Node(list(keys[num_kept:]), list(pages[num_kept:]), node, next(self._serials))
            node.children[leaf.keys[0]] = leaf
            self.num_pages += len(leaf.pages)
            self.num_unlocked += len(leaf.pages)
            kept = kept + leaf.pages
            node = leaf
        self._touch(node)
        self._queue(node)
        return Insertion(node, kept, duplicates)

    def lock(self, node: Node) -> None:
        """Keeps the path to `node` from being evicted, until `unlock`."""
        for step in _path_up(node):
            if step.num_locks == 0:
                self.num_unlocked -= len(step.pages)
            step.num_locks += 1

    def unlock(self, node: Node) -> None:
        for step in _path_up(node):
            step.num_locks -= 1
            if step.num_locks == 0:
                self.num_unlocked += len(step.pages)
                self._queue(step)
        self._drop_empty_root(node)

    def evict(self, count: int) -> list[int]:
        """Removes up to `count` unlocked pages, the least recently used first, and returns them."""
        evicted: list[int] = []
        while len(evicted) < count and self._heap:
            queued_at, _, node = heappop(self._heap)
            node.is_queued = False
            if node.num_locks or node.children:
                continue
            if node.last_used > queued_at:
                self._queue(node)
                continue
            split = max(0, len(node.pages) - (count - len(evicted)))
            evicted += reversed(node.pages[split:])
            if split == 0:
                self._remove(node)
            else:
                del node.pages[split:], node.keys[split:]
                self._queue(node)
        self.num_pages -= len(evicted)
        self.num_unlocked -= len(evicted)
        return evicted

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots included, parents first."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def check_integrity(self, locked: Sequence[Node]) -> None:
        """Checks the tree's structure, and its counts against `locked`, the nodes that users hold (with repeats).

        Raises:
            InferdbgError: something is wrong; the message says what.
        """
        locks: dict[int, int] = {}
        for node in locked:
            for step in _path_up(node):
                locks[step.serial] = locks.get(step.serial, 0) + 1
        pages: list[int] = []
        num_unlocked = 0
        for node in self.nodes():
            is_root = node.parent is None
            pages += node.pages
            num_unlocked += len(node.pages) if node.num_locks == 0 else 0
            _require(len(node.keys) == len(node.pages), "an edge's keys and pages differ in number")
            _require(is_root or bool(node.pages), "an edge is empty")
            _require(node.num_locks == locks.get(node.serial, 0), f"{node.num_locks} locks, not as many holders")
            for key, child in node.children.items():
                _require(child.parent is node and child.keys[0] == key, "a child is filed under a wrong key")
                _require(node.last_used >= child.last_used, "a child was used after its parent")
            evictable = not is_root and not node.children and node.num_locks == 0
            _require(node.is_queued or not evictable, "an evictable leaf is not queued for eviction")
        _require(len(set(pages)) == len(pages), "a page is in the tree twice")
        _require(len(pages) == self.num_pages, f"{len(pages)} pages in the tree, {self.num_pages} counted")
        _require(num_unlocked == self.num_unlocked, f"{num_unlocked} unlocked pages, {self.num_unlocked} counted")
        queued = [node.serial for _, _, node in self._heap]
        _require(len(set(queued)) == len(queued), "a node is queued for eviction twice")

    def _descend(self, node: Node, keys: Sequence[Hashable]) -> tuple[Node, list[int]]:
        """Follows `keys` down from `node` as far as they are there, splitting an edge where they leave it."""
        pages: list[int] = []
        done = 0
        while done < len(keys):
            child = node.children.get(keys[done])
            if child is None:
                break
            shared = _num_shared(child.keys, keys, done)
            if shared < len(child.keys):
                child = self._split(child, shared)
            pages += child.pages
            done += shared
            node = child
        return node, pages

    def _split(self, lower: Node, at: int) -> Node:
        """Puts a new node in the middle of an edge. The lower part keeps its identity, so what locks it still ends
        where it ended; and whoever locks the lower part locks the upper.
        """
        parent = lower.parent
        assert parent is not None
        upper = Node(lower.keys[:at], lower.pages[:at], parent, next(self._serials), lower.last_used, lower.num_locks)
        parent.children[upper.keys[0]] = upper
        lower.keys, lower.pages, lower.parent = lower.keys[at:], lower.pages[at:], upper
        upper.children[lower.keys[0]] = lower
        return upper

    def _touch(self, node: Node) -> None:
        now = self._clock()
        for step in _path_up(node):
            step.last_used = now

    def _queue(self, node: Node) -> None:
        """Queues a node for eviction if it is an unlocked leaf and not queued yet."""
        if node.num_locks == 0 and not node.children and not node.is_queued and node.parent is not None:
            node.is_queued = True
            heappush(self._heap, (node.last_used, node.serial, node))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.keys[0]]
        self._queue(parent)
        self._drop_empty_root(parent)

    def _drop_empty_root(self, node: Node) -> None:
        """Forgets a salt of which nothing is left, or a stream of new salts would grow the table for ever."""
        if node.parent is None and not node.children and node.num_locks == 0:
            self._roots.pop(node.salt, None)


def _path_up(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _num_shared(edge: list[Hashable], keys: Sequence[Hashable], start: int) -> int:
    """How many keys of an edge agree with `keys[start:]`."""
    run = keys[start : start + len(edge)]
    if len(run) == len(edge) and edge == run:
        return len(edge)
    for index, (ours, theirs) in enumerate(zip(edge, run, strict=False)):
        if ours != theirs:
            return index
    return len(run)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InferdbgError(f"prefix cache: {message}")
