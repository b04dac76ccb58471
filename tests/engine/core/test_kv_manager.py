import pytest
from fakes import request

from inferdbg.engine.core.cache.kv import KVCacheManager
from inferdbg.engine.core.sequence import Sequence
from inferdbg.engine.errors import InferdbgError


def sequence(seq_id: int, prompt: list[int], **fields: object) -> Sequence:
    return Sequence.from_request(
        request(seq_id, prompt, **fields), credit=100, max_total=1000, eos_token_ids=frozenset()
    )


def compute(kv: KVCacheManager, seq: Sequence) -> None:
    """Stands in for a prefill: takes pages for all tokens and says they are computed."""
    kv.acquire(seq)
    assert kv.grow(seq, len(seq.token_ids))
    seq.num_computed = len(seq.token_ids)
    kv.check_integrity()


def counts(kv: KVCacheManager) -> tuple[int, int, int]:
    kv.check_integrity()
    return kv.num_free, kv.num_used, kv.num_cached


def test_pages_go_from_free_to_private_to_shared_to_cached_to_free() -> None:
    kv = KVCacheManager(10, 4)
    seq = sequence(0, list(range(10)))
    compute(kv, seq)
    assert (counts(kv), seq.num_shared) == ((7, 3, 0), 0)
    kv.publish(seq)
    assert (counts(kv), seq.num_shared) == ((7, 3, 0), 2)  # two full pages; the third has two tokens
    kv.release(seq, publish=True)
    assert (counts(kv), len(seq.pages), seq.num_computed) == ((8, 0, 2), 0, 0)
    other = sequence(1, [60] * 40)
    compute(kv, other)
    assert (counts(kv), kv.num_evicted) == ((0, 10, 0), 2)


@pytest.mark.parametrize(("prompt", "num_cached"), [(12, 8), (13, 12), (14, 12), (17, 16), (3, 0)])
def test_a_hit_leaves_at_least_the_last_token_to_compute(prompt: int, num_cached: int) -> None:
    kv = KVCacheManager(10, 4)
    first = sequence(0, list(range(20)))
    compute(kv, first)
    kv.release(first, publish=True)
    second = sequence(1, list(range(prompt)))
    assert kv.acquire(second) == num_cached == second.num_computed == second.num_cached


def test_computed_pages_alone_are_published() -> None:
    kv = KVCacheManager(10, 4)
    first = sequence(0, list(range(16)))
    kv.acquire(first)
    kv.grow(first, 16)
    first.num_computed = 11
    kv.release(first, publish=True)
    assert kv.acquire(sequence(1, list(range(16)))) == 8


def test_two_sequences_that_computed_one_prefix_end_up_with_the_first_ones_pages() -> None:
    kv = KVCacheManager(20, 4)
    first, second = sequence(0, list(range(9))), sequence(1, [*range(8), 60, 61])
    compute(kv, first)
    compute(kv, second)
    assert counts(kv) == (14, 6, 0)
    kv.publish(first)
    kv.publish(second)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert counts(kv) == (16, 4, 0)
    kv.release(first, publish=True)
    assert counts(kv) == (17, 3, 0)  # the second still holds the shared ones
    kv.release(second, publish=True)
    assert counts(kv) == (18, 0, 2)


def test_growing_that_cannot_succeed_changes_nothing() -> None:
    kv = KVCacheManager(4, 4)
    cached, holder, greedy = sequence(0, [1] * 4), sequence(1, [2] * 8), sequence(2, [3] * 12)
    compute(kv, cached)
    kv.release(cached, publish=True)
    compute(kv, holder)
    kv.acquire(greedy)
    assert counts(kv) == (1, 2, 1)
    assert not kv.grow(greedy, 12)
    assert (counts(kv), list(greedy.pages), kv.num_evicted) == ((1, 2, 1), [], 0)
    assert kv.grow(greedy, 8)
    assert (counts(kv), kv.num_evicted) == ((0, 4, 0), 1)


def test_pages_in_use_are_not_evicted() -> None:
    kv = KVCacheManager(3, 4)
    first = sequence(0, [1] * 9)
    compute(kv, first)
    kv.publish(first)
    other = sequence(1, [2])
    kv.acquire(other)
    assert not kv.grow(other, 1)


def test_a_request_for_prompt_logprobs_finds_nothing_but_leaves_its_pages_to_others() -> None:
    kv = KVCacheManager(20, 4)
    for seq_id in range(2):
        scored = sequence(seq_id, list(range(9)), prompt_logprobs=0)
        compute(kv, scored)
        assert scored.num_cached == 0
        kv.release(scored, publish=True)
    assert kv.acquire(sequence(2, list(range(9)))) == 8
    resumed = sequence(3, list(range(9)), prompt_logprobs=0)
    resumed.token_ids.append(5)  # its scores were sent with its first output
    assert kv.acquire(resumed) == 8


def test_salts_separate_tenants() -> None:
    kv = KVCacheManager(20, 4)
    first = sequence(0, list(range(9)), cache_salt="a")
    compute(kv, first)
    kv.release(first, publish=True)
    assert kv.acquire(sequence(1, list(range(9)), cache_salt="b")) == 0
    assert kv.acquire(sequence(2, list(range(9)))) == 0
    assert kv.acquire(sequence(3, list(range(9)), cache_salt="a")) == 8


def test_without_prefix_cache_pages_go_straight_back() -> None:
    kv = KVCacheManager(10, 4, prefix_cache=False)
    seq = sequence(0, list(range(9)))
    compute(kv, seq)
    kv.publish(seq)
    kv.release(seq, publish=True)
    assert counts(kv) == (10, 0, 0)


def test_keys_may_come_from_elsewhere_than_token_ids() -> None:
    """A simulation has a trace's page hashes and no tokens."""
    hashes = {0: ["h1", "h2", "h3"], 1: ["h1", "h2", "h9"]}
    kv = KVCacheManager(10, 4, page_keys=lambda seq, first, last: list(hashes[seq.seq_id][first:last]))
    first = sequence(0, [0] * 12)
    compute(kv, first)
    kv.release(first, publish=True)
    assert kv.acquire(sequence(1, [0] * 13)) == 8


def test_releasing_twice_is_releasing_once() -> None:
    kv = KVCacheManager(10, 4)
    seq = sequence(0, list(range(9)))
    compute(kv, seq)
    kv.release(seq, publish=False)
    kv.release(seq, publish=False)
    assert counts(kv) == (10, 0, 0)


def test_a_lost_page_is_noticed() -> None:
    kv = KVCacheManager(10, 4)
    seq = sequence(0, list(range(9)))
    compute(kv, seq)
    seq.pages.pop()
    with pytest.raises(InferdbgError, match="computed more tokens than its pages hold"):
        kv.check_integrity()
    seq.num_computed = 8
    with pytest.raises(InferdbgError, match=r"7 free \+ 2 used \+ 0 cached pages \(9 with an owner\) are not the 10"):
        kv.check_integrity()
