"""Whatever clients do, in whatever order: no page is lost or shared wrongly, every sequence ends once, and its tokens
are those it would have got alone.
"""

from typing import Any

import pytest
from fakes import NO_EOS, Rig, check_kv, expected, rig
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferdbg.engine.core.events import FinishReason, StepFailed, StepRecord
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.errors import ContextLengthExceeded, InferdbgError

CONTEXT = 60
TEXTS = [[1 + (i * i * step) % 5 for i in range(40)] for step in (1, 2)]
PROMPTS = st.builds(
    lambda text, length, tail: (*text[:length], *tail),
    st.sampled_from(TEXTS),
    st.integers(1, 40),
    st.lists(st.integers(1, 3), max_size=4),
)
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(3, 25),
        "min_tokens": st.integers(0, 3),
        "prompt_logprobs": st.sampled_from([None, None, None, 0, 2]),
        "cache_salt": st.sampled_from([None, None, None, "tenant"]),
        "stop_token_ids": st.sampled_from([(), (7, 8, 9)]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Prompts are beginnings of a few fixed texts with or without a tail of their own, and next turns of sequences
    that have said something: prefixes meet and part all the time.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8, 16, 64]),
        tokens_in_pages=st.integers(40, 160),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 30),
        prefix_cache=st.booleans(),
        credit=st.sampled_from([1, 3, 8, 1000]),
        eos=st.sampled_from([frozenset[int](), frozenset({0, 1, 2, 3, 4, 5})]),
    )
    def start(self, page_size, tokens_in_pages, max_num_seqs, extra_budget, prefix_cache, credit, eos) -> None:  # type: ignore[no-untyped-def]
        self.rig: Rig = rig(
            num_pages=max(2, tokens_in_pages // page_size),
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            token_budget=max_num_seqs + extra_budget,
            prefix_cache=prefix_cache,
            client_credit=credit,
            eos=eos,
            context=CONTEXT,
        )
        self.requests: dict[int, SequenceRequest] = {}
        self.next_id = 0

    @rule(requests=st.lists(st.tuples(PROMPTS, PARAMS, st.integers(1, 3)), min_size=1, max_size=4))
    def add(self, requests: list[tuple[tuple[int, ...], dict[str, Any], int]]) -> None:
        for prompt, params, choices in requests:
            leader = self.next_id
            for choice in range(choices):
                self._add(prompt, **params, leader_id=leader if choice else None)

    @precondition(lambda self: self.rig.outputs())
    @rule(data=st.data(), params=PARAMS)
    def add_next_turn(self, data: st.DataObject, params: dict[str, Any]) -> None:
        """A client answers what it has got so far."""
        outputs = self.rig.outputs()
        seq_id = data.draw(st.sampled_from(sorted(outputs)))
        self._add((*self.requests[seq_id].prompt_ids, *outputs[seq_id], 1), **params)

    @rule(prompt=PROMPTS, forced=st.lists(st.integers(0, 9), min_size=1, max_size=12))
    def add_forced(self, prompt: tuple[int, ...], forced: list[int]) -> None:
        self._add(prompt, max_tokens=len(forced), forced_token_ids=tuple(forced))

    def _add(self, prompt: tuple[int, ...], **fields: object) -> None:
        try:
            made = self.rig.add(self.next_id, prompt, arrival_ns=self.next_id, **fields)
        except ContextLengthExceeded:
            return
        self.requests[self.next_id] = made
        self.next_id += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.engine.abort(data.draw(st.lists(st.sampled_from(sorted(self.requests)), min_size=1, max_size=3)))

    @rule(tokens=st.integers(1, 6), lags=st.sets(st.integers(0, 3)))
    def take_tokens(self, tokens: int, lags: set[int]) -> None:
        for seq_id in self.requests:
            if seq_id % 4 not in lags:
                self.rig.engine.add_credit(seq_id, tokens)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            engine, events = self.rig.engine, self.rig.events
            can_compute, has_work, num_events = engine._scheduler.has_work, engine.has_work, len(events)
            assert engine.step() is has_work
            assert len(events) == num_events + has_work
            if has_work and isinstance(record := events[-1], StepRecord):
                assert bool(record.chunk_seq_ids) is can_compute
                assert record.num_running == engine.num_running
                assert sum(record.waiting_requests) == engine.num_waiting
            self.rig.check()

    @rule(stage=st.sampled_from(["execute", "sample"]))
    def break_the_runner(self, stage: str) -> None:
        self.rig.runner.fail_next = stage

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def spoil_logits(self, data: st.DataObject) -> None:
        """From now on nothing can be sampled for one sequence, wherever it is."""
        self.rig.runner.unsamplable.add(data.draw(st.sampled_from(sorted(self.requests))))

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "rig"):
            return
        engine = self.rig.engine
        self.rig.check()
        assert engine.num_running + engine.num_waiting == len(self.requests) - len(self.rig.ends()) - self._untold()
        for record in self.rig.records[-1:]:
            assert record.pages_free + record.pages_used + record.pages_cached == engine._kv.num_pages
            assert sum(record.chunk_lens) <= record.token_budget

    def _untold(self) -> int:
        return len(self.rig.engine._recorder._finished)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        engine = self.rig.engine
        for seq_id in self.requests:
            engine.add_credit(seq_id, 1000)
        self.rig.drain()
        assert engine.num_running == engine.num_waiting == 0
        assert engine._kv.num_free + engine._kv.num_cached == engine._kv.num_pages
        assert not engine._scores._open
        self._check_outputs()

    def _check_outputs(self) -> None:
        ends, outputs = self.rig.ends(), self.rig.outputs()
        assert ends.keys() == self.requests.keys()
        for seq_id, made in self.requests.items():
            tokens, reason = expected(made, self.rig.eos)
            got = outputs.get(seq_id, [])
            if ends[seq_id] in (FinishReason.ABORT, FinishReason.ERROR):
                assert got == tokens[: len(got)]
            else:
                assert (got, ends[seq_id]) == (tokens, reason)
        failed = [event for event in self.rig.events if isinstance(event, StepFailed)]
        assert all(event.error.endswith(("planted: rows", "planted: execute", "planted: sample")) for event in failed)
        for event in failed:
            if event.error.startswith("RowsFailed"):
                assert set(event.seq_ids) <= self.rig.runner.unsamplable
        admitted = [i for x in self.rig.records for i, again in self._admissions(x) if not again]
        assert len(admitted) == len(set(admitted))
        assert set(outputs) <= set(admitted)

    @staticmethod
    def _admissions(record: StepRecord) -> list[tuple[int, bool]]:
        return list(zip(record.admitted_seq_ids, record.admitted_is_resume, strict=True))


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def test_a_page_with_two_owners_is_noticed() -> None:
    broken = rig(page_size=4)
    broken.add(0, [1] * 6, max_tokens=8)
    broken.add(1, [2] * 6, max_tokens=8)
    broken.step()
    first, second = broken.engine._scheduler.running
    second.pages[1] = first.pages[1]
    with pytest.raises(InferdbgError, match="belongs to sequence 0 and to sequence 1"):
        broken.engine.check_integrity()


def test_the_fake_computes_with_the_kv_it_is_given() -> None:
    """The machine above would see nothing if wrong KV did not show."""
    broken = rig(page_size=1)
    made = broken.add(0, [1, 2, 3], max_tokens=3)
    broken.step()
    broken.runner.slots[broken.engine._scheduler.running[0].pages[2]] ^= 1
    with pytest.raises(AssertionError, match="position 2"):
        check_kv(broken.engine, broken.runner)
    while broken.engine.step():
        pass
    assert broken.outputs()[0] != expected(made, NO_EOS)[0]
