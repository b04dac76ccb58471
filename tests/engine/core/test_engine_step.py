"""One step, end to end: how sequences end, what the record says, what happens when a stage raises."""

import itertools
import random

import pytest
from fakes import EOS, Rig, TickClock, expected, logprob, prefix_hashes, request, rig, top

from inferdbg.engine.core.events import FinishReason, StepFailed, StepRecord
from inferdbg.engine.core.offline import generate
from inferdbg.engine.core.runner import RowsFailed, SampledTokens, SampleRow, ScoreRow
from inferdbg.engine.errors import ContextLengthExceeded, InvalidRequest, UsageError

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def alone(prompt: list[int], num_outputs: int) -> list[int]:
    """What follows a prompt while nothing ends it."""
    return expected(request(0, prompt, max_tokens=num_outputs), frozenset())[0]


# How a sequence ends


def test_ends_at_max_tokens() -> None:
    r = rig()
    r.add(0, PROMPT, max_tokens=3)
    r.drain()
    assert r.outputs()[0] == alone(PROMPT, 3)
    assert (r.records[-1].finished_seq_ids, r.records[-1].finished_reasons) == ((0,), (FinishReason.LENGTH,))


def test_eos_ends_a_sequence_and_is_part_of_its_output() -> None:
    tokens = alone(PROMPT, 4)
    r = rig(eos=frozenset({tokens[3]}))
    r.add(0, PROMPT, max_tokens=30)
    r.drain()
    assert r.outputs()[0] == tokens
    assert r.ends() == {0: FinishReason.STOP}


def test_ignore_eos_ignores_eos_but_not_the_requests_own_stop_tokens() -> None:
    tokens = alone(PROMPT, 7)
    r = rig(eos=frozenset({tokens[3]}))
    r.add(0, PROMPT, max_tokens=30, ignore_eos=True, stop_token_ids=(tokens[6],))
    r.drain()
    assert r.outputs()[0] == tokens
    assert r.ends() == {0: FinishReason.STOP}


def test_stop_tokens_end_a_sequence_only_after_min_tokens() -> None:
    tokens = alone(PROMPT, 4)
    r = rig(eos=frozenset({EOS}))
    made = r.add(0, PROMPT, max_tokens=30, min_tokens=6, stop_token_ids=(tokens[3],))
    r.drain()
    outputs = r.outputs()[0]
    assert outputs == expected(made, r.eos)[0]
    assert tokens[3] not in outputs[:6]
    assert EOS not in outputs[:6]


def test_a_runner_that_samples_a_stop_too_early_does_not_end_the_sequence() -> None:
    tokens = alone(PROMPT, 9)
    r = rig(eos=frozenset({tokens[3]}))
    r.runner._eos = frozenset()  # it masks nothing
    r.add(0, PROMPT, max_tokens=9, min_tokens=4)
    r.drain()
    assert r.outputs()[0] == tokens
    assert r.ends() == {0: FinishReason.LENGTH}


def test_a_stop_as_the_last_token_allowed_is_a_stop() -> None:
    tokens = alone(PROMPT, 4)
    r = rig(eos=frozenset({tokens[3]}))
    r.add(0, PROMPT, max_tokens=4)
    r.drain()
    assert r.ends() == {0: FinishReason.STOP}


def test_forced_tokens_are_output_whatever_the_model_and_the_stops_say() -> None:
    forced = (7, EOS, 8, 8, EOS, 11)
    r = rig(eos=frozenset({EOS}))
    r.add(0, PROMPT, max_tokens=40, min_tokens=4, forced_token_ids=forced, stop_token_ids=(8,))
    r.drain()
    assert r.outputs()[0] == list(forced)
    assert r.ends() == {0: FinishReason.FORCED}
    hashes = prefix_hashes([*PROMPT, *forced])[len(PROMPT) - 1 :]
    said = [x.sampled_logprobs[0] for x in r.records]
    assert said == [logprob(h, token_id) for h, token_id in zip(hashes, forced, strict=False)]


# What is refused


def test_a_prompt_that_leaves_no_room_for_output_is_refused() -> None:
    r = rig(context=8)
    with pytest.raises(
        ContextLengthExceeded, match="the prompt has 8 tokens, which leaves no room for output in a context of 8"
    ) as refused:
        r.add(0, PROMPT)
    assert refused.value.param == "prompt"
    assert (r.engine.has_work, r.engine.num_waiting) == (False, 0)


@pytest.mark.parametrize("limits", [{"context": 16}, {"max_model_len": 16}, {"num_pages": 4, "page_size": 4}])
def test_output_beyond_the_context_or_the_pages_is_refused_not_cut(limits: dict[str, int]) -> None:
    r = rig(**limits)
    assert r.engine.max_model_len == 16
    with pytest.raises(ContextLengthExceeded, match="8 tokens and max_tokens=9 exceed the context of 16") as refused:
        r.add(0, PROMPT, max_tokens=9)
    assert refused.value.param == "max_tokens"
    r.add(1, PROMPT, max_tokens=8)
    r.drain()
    assert r.outputs() == {1: alone(PROMPT, 8)}
    assert r.ends() == {1: FinishReason.LENGTH}


def test_forced_tokens_count_as_the_output_whatever_max_tokens_allows() -> None:
    r = rig(context=10)
    with pytest.raises(ContextLengthExceeded, match="8 tokens and 3 forced_token_ids exceed the context") as refused:
        r.add(0, PROMPT, forced_token_ids=(1, 2, 3))
    assert refused.value.param == "forced_token_ids"
    r.add(1, PROMPT, max_tokens=100, forced_token_ids=(1, 2))
    r.drain()
    assert r.outputs() == {1: [1, 2]}


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([1, 64], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([1], {"stop_token_ids": (64,)}, "stop_token_ids"),
        ([1], {"logit_bias": {64: 1.0}}, "logit_bias"),
        ([1], {"forced_token_ids": (64,)}, "forced_token_ids"),
    ],
)
def test_ids_the_model_does_not_have_are_refused(prompt: list[int], fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rig().add(0, prompt, **fields)
    assert refused.value.param == param


def test_a_seq_id_in_use_is_refused() -> None:
    r = rig()
    r.add(0, PROMPT)
    with pytest.raises(ValueError, match="seq_id 0 is in use"):
        r.add(0, PROMPT)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match=r"max_model_len \(50\) exceeds the model's own context \(40\)"):
        rig(context=40, max_model_len=50)
    assert rig(context=40, max_model_len=30, num_pages=100).engine.max_model_len == 30


# Aborts


def test_an_abort_frees_the_pages_before_the_next_step_which_says_so() -> None:
    r = rig(prefix_cache=False)
    r.add(0, PROMPT, max_tokens=30)
    assert r.step().pages_used == 2
    r.engine.abort([0, 0, 77])
    assert r.engine.has_work
    record = r.step()
    assert (record.finished_seq_ids, record.finished_reasons) == ((0,), (FinishReason.ABORT,))
    assert (record.pages_free, record.pages_used, record.chunk_seq_ids, record.num_running) == (64, 0, (), 0)
    assert not r.engine.has_work
    assert not r.engine.step()


def test_what_an_aborted_sequence_computed_helps_the_client_that_tries_again() -> None:
    r = rig(token_budget=16, page_size=4)
    r.add(0, [1] * 40, max_tokens=3)
    r.step()
    r.engine.abort([0])
    r.add(1, [1] * 40, max_tokens=3)
    record = r.step()
    assert (record.admitted_seq_ids, record.admitted_cached) == ((1,), (16,))
    assert record.pages_used + record.pages_free == 64


def test_a_waiting_sequence_can_be_aborted_before_any_step() -> None:
    r = rig()
    r.add(0, PROMPT)
    r.engine.abort(iter([0]))
    assert r.step().finished_reasons == (FinishReason.ABORT,)


# Steps that fail


@pytest.mark.parametrize("stage", ["execute", "sample"])
def test_a_step_that_raises_ends_its_sequences_and_no_others(stage: str) -> None:
    r = rig(max_num_seqs=2, page_size=4, num_pages=20)
    r.add(0, PROMPT, max_tokens=9)
    r.add(1, [1, *PROMPT], max_tokens=9)
    healthy = r.add(2, [2, *PROMPT], max_tokens=9)
    for _ in range(6):
        r.step()
    r.runner.fail_next = stage
    assert r.engine.step()
    (failure,) = r.failures
    assert (failure.step, failure.stage, failure.seq_ids) == (6, stage, (0, 1))
    assert failure.error == f"RuntimeError: planted: {stage}"
    r.check()
    record = r.step()
    assert record.step == 7
    assert (record.admitted_seq_ids, record.finished_seq_ids) == ((2,), ())
    assert record.pages_cached == 4  # of what the failed ones did, their prefills; a page of output each is gone
    r.drain()
    assert r.outputs()[2] == expected(healthy, r.eos)[0]
    assert r.ends() == {0: FinishReason.ERROR, 1: FinishReason.ERROR, 2: FinishReason.LENGTH}


def test_sequences_that_cannot_be_sampled_end_alone_and_the_others_go_on() -> None:
    r = rig(max_num_seqs=4, token_budget=20)
    healthy = [r.add(0, PROMPT, max_tokens=9)]
    r.add(1, [1, *PROMPT], max_tokens=9)
    for _ in range(3):
        r.step()
    r.add(2, [2, *PROMPT], max_tokens=9)
    healthy += [r.add(3, [3, *PROMPT], max_tokens=9, prompt_logprobs=1)]
    healthy += [r.add(4, [4, *PROMPT], max_tokens=9)]
    r.runner.unsamplable = {1, 2}
    assert r.engine.step()
    (failure,) = r.failures
    assert (failure.step, failure.stage, failure.seq_ids) == (3, "sample", (1, 2))
    assert failure.error == "RowsFailed: planted: rows"
    r.check()
    record = r.step()  # the same step without them, and what was decided for it is told now
    assert record.chunk_seq_ids == (0, 3, 4)
    assert (record.sampled_seq_ids, len(record.prompt_scores)) == ((0, 3, 4), 1)
    assert record.admitted_seq_ids == (3, 4)
    assert record.prefix_queried_tokens == 9  # prompt_logprobs do not look
    r.drain()
    for made in healthy:
        assert r.outputs()[made.seq_id] == expected(made, r.eos)[0]
    assert r.ends() == {1: FinishReason.ERROR, 2: FinishReason.ERROR} | {
        made.seq_id: FinishReason.LENGTH for made in healthy
    }


def test_a_runner_that_blames_a_sequence_it_was_not_given_fails_the_step() -> None:
    r = rig()
    r.add(0, PROMPT, max_tokens=9)

    def blame(rows: list[SampleRow], scores: list[ScoreRow], top_k: int) -> SampledTokens:
        raise RowsFailed((77,), "planted")

    r.runner.sample = blame  # type: ignore[method-assign]
    assert r.engine.step()
    assert r.failures[0].seq_ids == (0,)
    assert not r.engine.has_work


def test_admissions_of_a_failed_step_are_not_told_of_sequences_that_ended_in_it() -> None:
    r = rig(max_num_seqs=1)
    r.add(0, PROMPT, max_tokens=2)
    r.add(1, PROMPT, max_tokens=2)
    r.runner.fail_next = "sample"
    r.engine.step()
    record = r.step()
    assert (record.admitted_seq_ids, record.admitted_cached) == ((1,), (0,))


def test_what_a_failed_prefill_wrote_is_not_published() -> None:
    r = rig()
    r.add(0, PROMPT, max_tokens=9)
    r.runner.fail_next = "execute"
    r.engine.step()
    again = r.add(1, PROMPT, max_tokens=9)
    assert r.step().admitted_cached == (0,)
    r.drain()
    assert r.outputs()[1] == expected(again, r.eos)[0]


def test_an_abort_is_told_by_the_step_after_the_one_that_failed() -> None:
    r = rig()
    r.add(0, PROMPT)
    r.add(1, PROMPT)
    r.engine.abort([1])
    r.runner.fail_next = "execute"
    r.engine.step()
    assert r.failures[0].seq_ids == (0,)
    assert r.engine.has_work
    assert r.step().finished_reasons == (FinishReason.ABORT,)


def test_preemptions_of_a_failed_step_are_told_by_the_next() -> None:
    r = rig(num_pages=4, page_size=4, prefix_cache=False)
    r.add(0, [1] * 7, max_tokens=3)
    r.add(1, [2] * 7, max_tokens=3)
    r.step()
    r.step()
    r.runner.fail_next = "sample"
    r.engine.step()
    assert r.failures[0].seq_ids == (0,)
    record = r.step()
    assert (record.preempted_seq_ids, record.admitted_seq_ids) == ((1,), (1,))


def test_a_scheduler_that_raises_takes_down_what_it_looked_at_and_does_not_turn_forever() -> None:
    r = rig(max_num_seqs=1)
    for seq_id in range(3):
        r.add(seq_id, PROMPT, max_tokens=9)
    r.step()
    rank = r.engine._scheduler._kv.grow
    r.engine._scheduler._kv.grow = lambda seq, n: 1 // 0  # type: ignore[method-assign,assignment]
    r.engine.step()
    assert (r.failures[0].stage, r.failures[0].seq_ids) == ("schedule", (0, 1))
    r.engine._scheduler._kv.grow = rank  # type: ignore[method-assign]
    r.drain()
    assert r.ends() == {0: FinishReason.ERROR, 1: FinishReason.ERROR, 2: FinishReason.LENGTH}


def test_a_runner_that_gives_too_few_tokens_fails_the_step_in_publish() -> None:
    r = rig()
    r.add(0, PROMPT, max_tokens=1)
    sample = r.runner.sample
    r.runner.sample = lambda rows, scores, k: sample([], [], k)  # type: ignore[method-assign]
    r.engine.step()
    assert (r.failures[0].stage, r.failures[0].seq_ids) == ("publish", (0,))
    r.check()


# The record


def test_the_stages_follow_one_another_and_the_gap_holds_the_handoff() -> None:
    r = rig()
    r.add(0, PROMPT, max_tokens=4)
    clock = r.engine._clock
    assert isinstance(clock, TickClock)

    def slow_observer(event: StepRecord | StepFailed) -> None:
        r.events.append(event)
        clock.now += 700

    r.engine.observer = slow_observer
    r.drain()
    for before, record in itertools.pairwise(r.records):
        stages = (record.schedule_ns, record.prepare_ns, record.execute_ns, record.sample_ns, record.publish_ns)
        assert record.end_ns == record.start_ns + sum(stages)
        assert record.start_ns - record.idle_ns == before.end_ns
        assert record.handoff_ns == 700 + clock.tick
        assert record.idle_ns >= record.handoff_ns
        assert min(stages) > 0
    assert [record.step for record in r.records] == [0, 1, 2, 3]
    assert r.engine.num_steps == 4


def test_alternatives_are_as_many_as_the_settings_or_the_greediest_request_asks() -> None:
    r = rig(top_logprobs=2)
    r.add(0, PROMPT, max_tokens=2)
    r.add(1, PROMPT, max_tokens=1, logprobs=5)
    first, second = r.step(), r.step()
    assert (first.sampled_top_k, len(first.sampled_top_ids)) == (5, 10)
    assert (second.sampled_top_k, len(second.sampled_top_ids)) == (2, 2)


@pytest.mark.parametrize("budget", [16, 17, 64])
def test_prompt_scores_are_gathered_over_chunks_and_sent_once(budget: int) -> None:
    prompt = [*PROMPT, *PROMPT, *PROMPT, *PROMPT, 7]
    r = rig(token_budget=budget)
    r.add(0, prompt, max_tokens=2)
    r.add(1, prompt, max_tokens=3, prompt_logprobs=2)
    r.drain()
    told = [(x, scores) for x in r.records for scores in x.prompt_scores]
    (record, scores) = told[0]
    assert len(told) == 1
    assert next(x for x in r.records if 1 in x.sampled_seq_ids) is record
    hashes = prefix_hashes(prompt)[:-1]
    assert scores.logprobs == tuple(logprob(h, t) for h, t in zip(hashes, prompt[1:], strict=True))
    assert (scores.seq_id, scores.k) == (1, 2)
    assert scores.top_ids == tuple(t for h in hashes for t in top(h, 2))
    assert scores.top_logprobs == tuple(logprob(h, t) for h in hashes for t in top(h, 2))


def test_a_prompt_of_one_token_has_no_scores_and_says_so() -> None:
    r = rig()
    r.add(0, [5], max_tokens=1, prompt_logprobs=3)
    (scores,) = r.step().prompt_scores
    assert (scores.logprobs, scores.top_ids) == ((), ())


def test_prompt_scores_start_over_after_a_preemption() -> None:
    r = rig(num_pages=12, page_size=4, token_budget=16, prefix_cache=False)
    r.add(0, [1] * 15, max_tokens=20)
    r.step()
    prompt = [2] * 32
    r.add(1, prompt, max_tokens=2, prompt_logprobs=0)
    r.step()
    r.step()  # the first needs a page while the second is in the middle of its prefill
    assert r.records[-1].preempted_seq_ids == (1,)
    r.drain()
    scores = [s for x in r.records for s in x.prompt_scores]
    hashes = prefix_hashes(prompt)[:-1]
    assert [s.logprobs for s in scores] == [tuple(logprob(h, 2) for h in hashes)]


def test_sampler_rows_carry_tokens_only_where_penalties_need_them() -> None:
    r = rig()
    r.add(0, PROMPT, max_tokens=2)
    r.add(1, PROMPT, max_tokens=2, presence_penalty=1.0)
    r.add(2, PROMPT, max_tokens=2, repetition_penalty=1.5, seed=99)
    r.step()
    r.step()
    rows = {row.seq_id: row for row in r.runner.sample_calls[-1][0]}
    first = (alone(PROMPT, 1)[0],)
    assert [(rows[i].prompt_ids, rows[i].output_ids) for i in range(3)] == [
        ((), ()),
        ((), first),
        (tuple(PROMPT), first),
    ]
    assert [(row.output_index, row.seed) for row in rows.values()] == [(1, 0), (1, 0), (1, 99)]


# Many sequences


def workload(seed: int) -> list[dict[str, object]]:
    rng = random.Random(seed)
    shared = [rng.randint(1, 20) for _ in range(40)]
    return [
        {
            "prompt": shared[: rng.randint(0, 40)] + [rng.randint(1, 20) for _ in range(rng.randint(1, 9))],
            "max_tokens": rng.randint(1, 25),
            "min_tokens": rng.choice([0, 1]),
            "prompt_logprobs": rng.choice([None, None, 1]),
        }
        for _ in range(14)
    ]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("budget", [5, 23, 512])
def test_outputs_do_not_depend_on_how_the_engine_is_set_up(page_size: int, prefix_cache: bool, budget: int) -> None:
    r = rig(
        page_size=page_size,
        num_pages=-(-84 // page_size),
        prefix_cache=prefix_cache,
        token_budget=budget,
        max_num_seqs=5,
        client_credit=3,
        eos=frozenset({EOS}),
    )
    requests = [request(i, **fields) for i, fields in enumerate(workload(page_size))]  # type: ignore[arg-type]
    outputs = generate(r.engine, requests)
    for made, output in zip(requests, outputs, strict=True):
        assert (output.token_ids, output.finish_reason) == expected(made, r.eos)
        assert (output.prompt_scores is not None) == (made.sampling.prompt_logprobs is not None)
    r.check()
    assert r.engine._kv.num_used == 0
    if page_size < 64:  # the larger ones are not meant to be calm either, but two pages of 64 admit one at a time
        assert sum(output.num_preemptions for output in outputs) > 0


def test_generate_runs_none_of_its_requests_if_one_is_refused() -> None:
    r: Rig = rig()
    with pytest.raises(InvalidRequest):
        generate(r.engine, [request(0, PROMPT), request(1, [])])
    r.drain()
    assert r.ends() == {0: FinishReason.ABORT}
    assert r.outputs() == {}


def test_generate_says_which_sequence_failed_and_finishes_the_others() -> None:
    r = rig(max_num_seqs=1)
    r.runner.fail_next = "execute"
    failed, fine = generate(r.engine, [request(0, PROMPT), request(1, PROMPT, max_tokens=2)])
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "RuntimeError: planted: execute")
    assert (fine.finish_reason, fine.token_ids) == (FinishReason.LENGTH, alone(PROMPT, 2))
    assert len(r.events) == 3  # the engine's own observer heard all of it
