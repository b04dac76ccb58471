"""The compressed tree against a dictionary that has one entry per cached page, keyed by the whole prefix."""

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import pytest

from inferdbg.engine.core.cache.radix import Node, RadixCache
from inferdbg.engine.errors import InferdbgError

Prefix = tuple[str | None, tuple[Hashable, ...]]


@dataclass
class PlainCache:
    """What a prefix cache means, by brute force."""

    pages: dict[Prefix, int] = field(default_factory=dict)
    used: dict[Prefix, int] = field(default_factory=dict)
    locks: list[Prefix] = field(default_factory=list)
    now: int = 0

    def insert(self, salt: str | None, keys: list[Hashable], pages: list[int]) -> tuple[list[int], list[int]]:
        duplicates = []
        for i, page in enumerate(pages):
            prefix = (salt, tuple(keys[: i + 1]))
            if prefix in self.pages:
                duplicates.append(page)
            self.pages.setdefault(prefix, page)
        self._touch(salt, keys)
        return [self.pages[salt, tuple(keys[: i + 1])] for i in range(len(keys))], duplicates

    def match(self, salt: str | None, keys: list[Hashable]) -> list[int]:
        found = []
        while len(found) < len(keys) and (salt, tuple(keys[: len(found) + 1])) in self.pages:
            found.append(self.pages[salt, tuple(keys[: len(found) + 1])])
        self._touch(salt, keys[: len(found)])
        return found

    def unlocked(self) -> list[Prefix]:
        return [p for p in self.pages if not any(q[0] == p[0] and q[1][: len(p[1])] == p[1] for q in self.locks)]

    def evict(self, count: int) -> list[int]:
        evicted = []
        while len(evicted) < count:
            leaves = [p for p in self.unlocked() if not any(q[0] == p[0] and q[1][:-1] == p[1] for q in self.pages)]
            if not leaves:
                break
            oldest = min(leaves, key=lambda p: self.used[p])
            evicted.append(self.pages.pop(oldest))
        return evicted

    def _touch(self, salt: str | None, keys: list[Hashable]) -> None:
        self.now += 1
        for i in range(len(keys)):
            self.used[salt, tuple(keys[: i + 1])] = self.now


KEYS: dict[str, Callable[[int], Hashable]] = {
    "token ids": lambda letter: letter,
    "tuples of token ids": lambda letter: (letter, 7, letter),
    "page hashes": lambda letter: f"hash-{letter}",
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("seed", range(25))
def test_agrees_with_a_dictionary_of_prefixes(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    tree, plain = RadixCache(), PlainCache()
    locked: list[tuple[Node, Prefix]] = []
    next_page = 0
    for _ in range(120):
        salt = rng.choice([None, None, "a"])
        keys = [KEYS[kind](rng.randint(0, 1)) for _ in range(rng.randint(0, 9))]
        match rng.choice(["insert", "insert", "match", "lock", "unlock", "evict"]):
            case "insert":
                pages = list(range(next_page, next_page + len(keys)))
                next_page += len(keys)
                inserted = tree.insert(tree.root(salt), keys, pages)
                assert (inserted.pages, inserted.duplicates) == plain.insert(salt, keys, pages)
            case "match":
                assert tree.match(keys, salt)[1] == plain.match(salt, keys)
            case "lock":
                node, pages = tree.match(keys, salt)
                assert pages == plain.match(salt, keys)
                tree.lock(node)
                locked.append((node, (salt, tuple(keys[: len(pages)]))))
                plain.locks.append(locked[-1][1])
            case "unlock" if locked:
                node, prefix = locked.pop(rng.randrange(len(locked)))
                tree.unlock(node)
                plain.locks.remove(prefix)
            case "evict":
                count = rng.randint(1, 6)
                assert tree.evict(count) == plain.evict(count)
        assert tree.num_pages == len(plain.pages)
        assert tree.num_unlocked == len(plain.unlocked())
        tree.check_integrity([node for node, _ in locked])


def test_insertion_below_a_locked_node_continues_its_path() -> None:
    tree = RadixCache()
    head = tree.insert(tree.root(), ["a", "b"], [0, 1]).node
    tree.lock(head)
    tree.insert(head, ["c"], [2])
    assert tree.match(["a", "b", "c"])[1] == [0, 1, 2]


def test_a_locked_node_still_ends_its_path_after_its_edge_was_split() -> None:
    tree = RadixCache()
    node = tree.insert(tree.root(), ["a", "b", "c"], [0, 1, 2]).node
    tree.lock(node)
    tree.insert(tree.root(), ["a", "x"], [8, 9])
    assert tree.evict(10) == [9]
    tree.insert(node, ["d"], [3])
    assert tree.match(["a", "b", "c", "d"])[1] == [0, 1, 2, 3]


def test_the_least_recently_used_leaf_goes_first_and_its_tail_before_its_head() -> None:
    tree = RadixCache()
    tree.insert(tree.root(), ["a", "b"], [0, 1])
    tree.insert(tree.root(), ["c", "d"], [2, 3])
    tree.match(["a", "b"])
    assert tree.evict(3) == [3, 2, 1]
    assert tree.match(["a", "b"])[1] == [0]


def test_a_given_clock_decides_what_is_old() -> None:
    now = 0
    tree = RadixCache(clock=lambda: now)
    now = 5
    tree.insert(tree.root(), ["a"], [0])
    now = 9
    tree.insert(tree.root(), ["b"], [1])
    assert tree.evict(1) == [0]


def test_salts_never_see_each_others_pages_and_leave_nothing_behind() -> None:
    tree = RadixCache()
    for tenant in range(50):
        salt = f"tenant-{tenant}"
        assert tree.match(["a"], salt)[1] == []
        tree.insert(tree.root(salt), ["a"], [tenant])
        assert tree.match(["a"], salt)[1] == [tenant]
    assert sorted(tree.evict(50)) == list(range(50))
    assert list(tree.nodes()) == []


def test_the_eviction_queue_does_not_grow_with_use() -> None:
    tree = RadixCache()
    for i in range(10):
        tree.insert(tree.root(), [i], [i])
    for _ in range(100):
        for i in range(10):
            node, _ = tree.match([i])
            tree.lock(node)
            tree.unlock(node)
    assert len(tree._heap) == 10


def test_integrity_check_names_a_wrong_lock_count() -> None:
    tree = RadixCache()
    node = tree.insert(tree.root(), ["a"], [0]).node
    tree.lock(node)
    with pytest.raises(InferdbgError, match="1 locks, not as many holders"):
        tree.check_integrity([])
