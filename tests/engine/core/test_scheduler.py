"""Who runs when: the scheduler's rules, one by one, seen in the records of an engine on a hash for a model."""

import pytest
from fakes import Rig, expected, rig

from inferdbg.engine.core.events import FinishReason, StepRecord, WaitReason
from inferdbg.engine.core.scheduler.policy import make_policy
from inferdbg.engine.errors import UsageError

Chunk = tuple[int, int, int, bool]  # seq_id, start, length, is_prefill


def chunks(record: StepRecord) -> list[Chunk]:
    columns = (record.chunk_seq_ids, record.chunk_starts, record.chunk_lens, record.chunk_is_prefill)
    return list(zip(*columns, strict=True))


def waits(record: StepRecord) -> dict[WaitReason, tuple[int, int]]:
    counts = zip(record.waiting_requests, record.waiting_tokens, strict=True)
    return dict(zip(record.waiting_reasons, counts, strict=True))


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    r = rig(token_budget=16)
    r.add(0, [1] * 40, max_tokens=2)
    assert chunks(r.step()) == [(0, 0, 16, True)]
    assert chunks(r.step()) == [(0, 16, 16, True)]
    last = r.step()
    assert chunks(last) == [(0, 32, 8, True)]
    assert last.sampled_seq_ids == (0,)
    assert chunks(r.step()) == [(0, 40, 1, False)]
    assert [len(record.sampled_ids) for record in r.records] == [0, 0, 1, 1]


def test_a_chunk_that_leaves_one_prompt_token_is_followed_by_a_prefill_of_one() -> None:
    r = rig(token_budget=16)
    r.add(0, [1] * 17, max_tokens=1)
    r.step()
    record = r.step()
    assert chunks(record) == [(0, 16, 1, True)]
    assert record.sampled_seq_ids == (0,)


def test_decodes_come_first_and_prefill_chunks_share_what_they_leave() -> None:
    r = rig(token_budget=16, page_size=1, num_pages=200)
    r.add(0, [1] * 4, max_tokens=9)
    r.add(1, [2] * 5, max_tokens=9)
    r.step()
    r.add(2, [3] * 20, max_tokens=9)
    r.add(3, [4] * 20, max_tokens=9)
    assert chunks(r.step()) == [(0, 4, 1, False), (1, 5, 1, False), (2, 0, 14, True)]
    assert waits(r.records[-1]) == {WaitReason.BUDGET: (1, 20)}
    mixed = r.step()
    assert chunks(mixed) == [(0, 5, 1, False), (1, 6, 1, False), (2, 14, 6, True), (3, 0, 8, True)]
    assert mixed.sampled_seq_ids == (0, 1, 2)
    assert r.runner.batches[-1].num_decodes == 2


def test_running_prefills_go_on_before_anyone_is_admitted() -> None:
    r = rig(token_budget=16)
    r.add(0, [1] * 40, max_tokens=1)
    r.add(1, [2] * 4, max_tokens=1)
    assert chunks(r.step()) == [(0, 0, 16, True)]
    assert chunks(r.step()) == [(0, 16, 16, True)]
    assert chunks(r.step()) == [(0, 32, 8, True), (1, 0, 4, True)]


def test_full_slots_keep_everyone_waiting() -> None:
    r = rig(max_num_seqs=2)
    for seq_id in range(5):
        r.add(seq_id, [seq_id + 1] * 3, max_tokens=3, arrival_ns=100 + seq_id)
    record = r.step()
    assert record.admitted_seq_ids == (0, 1)
    assert waits(record) == {WaitReason.SLOTS: (3, 9)}
    assert record.oldest_waiting_ns == 102
    assert (record.num_running, r.engine.num_running, r.engine.num_waiting) == (2, 2, 3)


def test_one_that_lacks_pages_blocks_those_behind_it() -> None:
    r = rig(num_pages=10, page_size=4)
    r.add(0, [1] * 20, max_tokens=8)
    r.add(1, [2] * 24, max_tokens=8)
    r.add(2, [3] * 4, max_tokens=8)
    r.add(3, [4] * 4, max_tokens=8)
    record = r.step()
    assert record.admitted_seq_ids == (0,)
    assert waits(record) == {WaitReason.PAGES: (1, 24), WaitReason.ORDER: (2, 8)}
    r.drain()
    first_tokens = {seq_id: next(x.step for x in r.records if seq_id in x.sampled_seq_ids) for seq_id in range(4)}
    assert first_tokens[0] < first_tokens[1] <= first_tokens[2] <= first_tokens[3]


def fill(r: Rig, num_seqs: int, prompt: int, max_tokens: int) -> None:
    for seq_id in range(num_seqs):
        r.add(seq_id, [seq_id + 1] * prompt, max_tokens=max_tokens, arrival_ns=seq_id)


def test_when_pages_run_out_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    r = rig(num_pages=7, page_size=4, prefix_cache=False)
    fill(r, 3, prompt=7, max_tokens=6)
    assert chunks(r.step()) == [(0, 0, 7, True), (1, 0, 7, True), (2, 0, 7, True)]
    r.step()  # position 7 still fits the second page
    r.add(3, [9] * 3, max_tokens=2, arrival_ns=3)
    record = r.step()  # position 8 needs a third page each; one is free
    assert (record.preempted_seq_ids, record.preempted_lost) == ((2,), (8,))
    assert chunks(record) == [(0, 8, 1, False), (1, 8, 1, False)]
    assert waits(record) == {WaitReason.PAGES: (1, 9), WaitReason.ORDER: (1, 3)}
    assert record.oldest_waiting_ns == 2
    r.drain()
    admissions = [a for x in r.records for a in zip(x.admitted_seq_ids, x.admitted_is_resume, strict=True)]
    assert next(a for a in admissions if a[1]) == (2, True)
    assert admissions.index((2, True)) < admissions.index((3, False))
    assert set(r.ends().values()) == {FinishReason.LENGTH}


def test_the_oldest_runs_on_however_short_pages_are() -> None:
    r = rig(num_pages=5, page_size=4, prefix_cache=False)
    fill(r, 4, prompt=4, max_tokens=16)
    while r.engine.has_work:
        before = [seq.seq_id for seq in r.engine._scheduler.running]
        record = r.step()
        assert not before or min(before) in record.chunk_seq_ids
    finish_order = [seq_id for x in r.records for seq_id in x.finished_seq_ids]
    assert finish_order == [0, 1, 2, 3]


def test_a_preempted_sequence_finds_its_own_work_in_the_cache_if_nobody_needed_the_pages() -> None:
    r = rig(num_pages=9, page_size=4)
    fill(r, 2, prompt=15, max_tokens=6)
    r.drain()
    resumed = [x for x in r.records if any(x.admitted_is_resume)]
    assert len(resumed) == 1
    assert resumed[0].admitted_cached[0] > 0
    assert resumed[0].prefix_hit_tokens == resumed[0].admitted_cached[0]
    assert resumed[0].prefix_queried_tokens > 15


def siblings(r: Rig, prompt: int = 9, choices: int = 3, **fields: object) -> None:
    for seq_id in range(choices):
        leader_id = 0 if seq_id else None
        r.add(seq_id, list(range(prompt)), max_tokens=4, leader_id=leader_id, arrival_ns=50 + seq_id, **fields)


def test_further_choices_wait_for_the_first_ones_prefill_and_share_it() -> None:
    r = rig(token_budget=16, page_size=4)
    siblings(r, prompt=20)
    record = r.step()
    assert chunks(record) == [(0, 0, 16, True)]
    assert waits(record) == {WaitReason.SIBLING: (2, 40)}
    assert record.oldest_waiting_ns == 51
    r.step()
    record = r.step()
    assert list(zip(record.admitted_seq_ids, record.admitted_cached, strict=True)) == [(1, 16), (2, 16)]
    assert record.pages_used == 5 + 1  # the full pages of the prompt once for all, and one of output
    assert chunks(record) == [(0, 20, 1, False), (1, 16, 4, True), (2, 16, 4, True)]


def test_waiting_choices_do_not_hold_up_other_requests() -> None:
    r = rig(token_budget=16)
    siblings(r, prompt=12)
    r.add(3, [9] * 3, max_tokens=2, arrival_ns=60)
    assert r.step().admitted_seq_ids == (0, 3)


@pytest.mark.parametrize("why", ["no prefix cache", "prompt logprobs"])
def test_choices_that_could_not_share_do_not_wait(why: str) -> None:
    r = rig(prefix_cache=why != "no prefix cache")
    siblings(r, prompt_logprobs=0 if why == "prompt logprobs" else None)
    assert r.step().admitted_seq_ids == (0, 1, 2)


def test_choices_whose_leader_is_gone_do_not_wait() -> None:
    r = rig()
    siblings(r)
    r.engine.abort([0])
    record = r.step()
    assert record.admitted_seq_ids == (1, 2)
    r.add(3, [5], max_tokens=1, leader_id=0)
    assert r.step().admitted_seq_ids == (3,)


def test_a_choice_may_be_aborted_while_it_waits() -> None:
    r = rig(token_budget=16)
    siblings(r, prompt=20)
    r.step()
    r.engine.abort([1, 2])
    r.drain()
    assert r.ends() == {0: FinishReason.LENGTH, 1: FinishReason.ABORT, 2: FinishReason.ABORT}


def test_a_sequence_without_credit_pauses_with_its_pages_and_gives_up_its_slot() -> None:
    r = rig(max_num_seqs=1, client_credit=3, token_budget=16)
    first = r.add(0, [1] * 5, max_tokens=6)
    r.add(1, [2] * 5, max_tokens=2, arrival_ns=7)
    for _ in range(3):
        record = r.step()
    assert waits(record) == {WaitReason.SLOTS: (1, 5), WaitReason.CREDIT: (1, 1)}
    assert record.oldest_waiting_ns == 7
    assert (record.num_running, record.pages_used) == (0, 2)
    assert r.step().admitted_seq_ids == (1,)
    r.engine.add_credit(0, 10)
    r.step()  # the slot is taken until this step's end
    record = r.step()
    assert chunks(record) == [(0, 7, 1, False)]
    assert record.admitted_seq_ids == ()
    r.drain()
    assert r.outputs()[0] == expected(first, r.eos)[0]
    assert all(not x.preempted_seq_ids for x in r.records)


def test_an_engine_whose_sequences_are_all_paused_has_no_work() -> None:
    r = rig(client_credit=1)
    r.add(0, [1], max_tokens=3)
    record = r.step()
    assert waits(record) == {WaitReason.CREDIT: (1, 1)}
    assert not r.engine.has_work
    assert not r.engine.step()
    assert (r.engine.num_running, r.engine.num_waiting) == (0, 1)
    r.engine.add_credit(0, 1)
    assert r.step().sampled_seq_ids == (0,)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_paused_sequences_lose_their_pages_before_anyone_who_runs(prefix_cache: bool) -> None:
    r = rig(num_pages=6, page_size=4, client_credit=2, prefix_cache=prefix_cache)
    paused = r.add(0, [1] * 8, max_tokens=6)
    r.step()
    r.step()
    r.add(1, [2] * 16, max_tokens=2, arrival_ns=1)
    r.add(2, [3], max_tokens=2, arrival_ns=2)
    record = r.step()
    assert (record.preempted_seq_ids, record.preempted_lost, record.admitted_seq_ids) == ((0,), (9,), (1,))
    assert waits(record) == {WaitReason.PAGES: (1, 1), WaitReason.CREDIT: (1, 10)}
    r.engine.add_credit(0, 100)
    r.drain()
    assert r.outputs()[0] == expected(paused, r.eos)[0]


def test_nobody_is_admitted_in_a_step_that_took_pages_from_another() -> None:
    r = rig(num_pages=5, page_size=4, client_credit=2)
    r.add(0, [1] * 8, max_tokens=6)
    r.add(1, [2] * 7, max_tokens=6)
    r.step()
    r.step()  # both pause; the first has three pages, the second two
    r.engine.add_credit(1, 100)
    r.add(2, [3], max_tokens=1)
    record = r.step()
    assert (record.preempted_seq_ids, record.admitted_seq_ids) == ((0,), ())
    assert waits(record) == {WaitReason.PAGES: (1, 1), WaitReason.CREDIT: (1, 10)}
    assert r.step().admitted_seq_ids == (2,)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="policy must be one of fcfs, 'lifo' given"):
        make_policy("lifo")


def test_many_waiting_sequences_are_served_in_order_of_arrival() -> None:
    r = rig(max_num_seqs=3, num_pages=200)
    order = [5, 3, 8, 1, 9, 0, 2, 7, 6, 4]
    for seq_id in order:
        r.add(seq_id, [seq_id + 1] * 3, max_tokens=2, arrival_ns=order.index(seq_id) // 2)
    r.drain()
    admitted = [seq_id for x in r.records for seq_id in x.admitted_seq_ids]
    assert admitted == [3, 5, 1, 8, 0, 9, 2, 7, 4, 6]
