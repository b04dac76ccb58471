"""Decides what each step computes: continuous batching under a token budget, with recompute preemption.
Knows no tensor, no sampling and no client; pages come from the KV cache manager, order from the policy.
"""

from __future__ import annotations

from bisect import insort

from inferdbg.engine.core.cache.kv import KVCacheManager
from inferdbg.engine.core.events import WaitReason
from inferdbg.engine.core.scheduler.decision import Admission, Preemption, ScheduleDecision, Waits
from inferdbg.engine.core.scheduler.policy import Policy
from inferdbg.engine.core.scheduler.waiting import WaitingLine
from inferdbg.engine.core.sequence import Sequence, SequenceState
from inferdbg.engine.errors import InferdbgError

__all__ = ["Scheduler"]


class Scheduler:
    """A live sequence is in exactly one of these places:

        held by a sibling ──leader's prefill done──> in line ──admit──> running ──> finished or dropped
                                                      ^   ^                │  ^
                                                      │   └── preempt ─────┤  │ slot free again
                                          credit again│                    v  │
                                                      └── no pages ───── paused (credit used up)

    Running sequences hold pages and one of `max_num_seqs` slots. Paused ones keep their pages but no slot, so a client
    that reads slowly costs the others memory at most, and not even that when they need it.

    No livelock: ranks are fixed and a sequence preempts only those behind it, so the first of the running always gets
    its pages (all of them, if need be: a sequence that does not fit alone is refused before it comes here) and at
    least one token of the budget (the budget is no smaller than the number of slots).
    """

    def __init__(self, kv: KVCacheManager, policy: Policy, *, max_num_seqs: int, token_budget: int) -> None:
        self.running: list[Sequence] = []  # by rank
        self._kv = kv
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._live: dict[int, Sequence] = {}
        self._line = WaitingLine(policy)
        self._siblings: dict[int, list[Sequence]] = {}  # by leader_id
        self._paused: list[Sequence] = []  # by rank

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        return bool(self.running or len(self._line) or any(seq.credit > 0 for seq in self._paused))

    @property
    def num_live(self) -> int:
        return len(self._live)

    def get(self, seq_id: int) -> Sequence | None:
        """A live sequence."""
        return self._live.get(seq_id)

    def add(self, seq: Sequence) -> None:
        """Takes a new sequence, which must fit the pages when it is alone.

        A further choice of a request waits for the first one's prefill, to share it through the prefix cache.
        """
        leader_id = seq.request.leader_id
        leader = None if leader_id is None else self._live.get(leader_id)
        self._live[seq.seq_id] = seq
        if leader is not None and leader.num_output == 0 and self._kv.reads_cache(seq):
            self._siblings.setdefault(leader.seq_id, []).append(seq)
        else:
            self._line.add(seq)

    def schedule(self) -> ScheduleDecision:
        """Decides the next step and allocates its pages: running decodes, running prefills, then admissions."""
        self._resume_paused()
        preempted = self._make_room_for_decodes()
        decodes = [seq for seq in self.running if seq.is_decode]
        chunks = dict.fromkeys(decodes, 1)
        budget = self._token_budget - len(decodes)
        for seq in self.running:
            if budget > 0 and seq not in chunks:
                chunks[seq] = min(seq.num_to_compute, budget)
                budget -= chunks[seq]
        admitted: list[Admission] = []
        blocked_by: WaitReason | None = WaitReason.PAGES if preempted else None
        while blocked_by is None and (head := self._line.head()) is not None:
            if len(self.running) >= self._max_num_seqs:
                blocked_by = WaitReason.SLOTS
            elif budget == 0:
                blocked_by = WaitReason.BUDGET
            elif (admission := self._admit(head, preempted)) is None:
                blocked_by = WaitReason.PAGES
            else:
                admitted.append(admission)
                chunks[head] = min(head.num_to_compute, budget)
                budget -= chunks[head]
                blocked_by = WaitReason.PAGES if preempted else None
        ordered = sorted(chunks, key=lambda seq: not seq.is_decode)
        return ScheduleDecision(
            seqs=tuple(ordered),
            starts=tuple(seq.num_computed for seq in ordered),
            lens=tuple(chunks[seq] for seq in ordered),
            num_decodes=sum(seq.is_decode for seq in ordered),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            blocked_by=blocked_by,
        )

    def prefill_done(self, seq: Sequence) -> None:
        """The first output of `seq` is there: lets the other choices of its request into the line."""
        for sibling in self._siblings.pop(seq.seq_id, ()):
            self._line.add(sibling)

    def pause(self, seq: Sequence) -> None:
        """Takes the slot of a running sequence whose credit is used up."""
        self.running.remove(seq)
        seq.state = SequenceState.WAITING
        insort(self._paused, seq, key=self._policy.rank)

    def add_credit(self, seq: Sequence, tokens: int) -> None:
        """Lets a sequence sample `tokens` more. One that lost its pages while paused goes back into the line."""
        seq.credit += tokens
        if seq.credit > 0 and seq.state is SequenceState.PREEMPTED and seq not in self._line:
            self._paused.remove(seq)
            self._line.add(seq)

    def remove(self, seq: Sequence, *, publish: bool) -> None:
        """Ends a live sequence wherever it is and frees its pages; `publish` leaves what it computed in the cache."""
        del self._live[seq.seq_id]
        if seq in self._line:
            self._line.remove(seq)
        for place in (self.running, self._paused):
            if seq in place:
                place.remove(seq)
        self._leave_siblings(seq)
        self._kv.release(seq, publish=publish)
        seq.state = SequenceState.FINISHED
        self.prefill_done(seq)

    def suspects(self) -> list[Sequence]:
        """Whom to end when scheduling itself fails: all it was looking at. Others may be fine."""
        head = self._line.head()
        return [*self.running, *([head] if head is not None else [])]

    def waits(self, blocked_by: WaitReason | None) -> Waits:
        """Who waits now, and why as the last decision saw it.

        Full slots and a used-up budget keep everyone in line; missing pages keep the head, and the head the others.
        """
        counts: dict[WaitReason, tuple[int, int]] = {}

        def count(reason: WaitReason, requests: int, tokens: int) -> None:
            if requests:
                before = counts.get(reason, (0, 0))
                counts[reason] = (before[0] + requests, before[1] + tokens)

        head = self._line.head()
        if head is not None:
            in_line, tokens = len(self._line), self._line.num_tokens
            if blocked_by is WaitReason.PAGES:
                count(WaitReason.PAGES, 1, head.num_to_compute)
                count(WaitReason.ORDER, in_line - 1, tokens - head.num_to_compute)
            else:  # without a reason: siblings let into the line after the decision
                count(blocked_by or WaitReason.SIBLING, in_line, tokens)
        oldest = self._line.oldest_ns()
        for siblings in self._siblings.values():
            count(WaitReason.SIBLING, len(siblings), sum(seq.num_to_compute for seq in siblings))
            arrival = min(seq.request.arrival_ns for seq in siblings)
            oldest = arrival if oldest is None else min(oldest, arrival)
        for seq in self._paused:
            count(WaitReason.SLOTS if seq.credit > 0 else WaitReason.CREDIT, 1, seq.num_to_compute)
        reasons = tuple(counts)
        return Waits(reasons, tuple(counts[r][0] for r in reasons), tuple(counts[r][1] for r in reasons), oldest)

    def check_integrity(self) -> None:
        """Checks that every live sequence is in one place, and that those with pages are the ones that should be.

        Raises:
            InferdbgError: it is not so.
        """
        siblings = [seq for group in self._siblings.values() for seq in group]
        in_line = [seq for seq in self._live.values() if seq in self._line]
        places = [*self.running, *self._paused, *siblings, *in_line]
        if len(in_line) != len(self._line) or sorted(seq.seq_id for seq in places) != sorted(self._live):
            raise InferdbgError("a live sequence is in no place of the scheduler, or in two")
        if sum(seq.num_to_compute for seq in in_line) != self._line.num_tokens:
            raise InferdbgError("the tokens of the waiting line are miscounted")
        if len(self.running) > self._max_num_seqs:
            raise InferdbgError(f"{len(self.running)} sequences run in {self._max_num_seqs} slots")
        with_pages = {seq.seq_id for seq in (*self.running, *self._paused) if seq.state is not SequenceState.PREEMPTED}
        if with_pages != self._kv.holders():
            raise InferdbgError("a sequence has pages without running, or runs without pages")

    def _leave_siblings(self, seq: Sequence) -> None:
        leader_id = seq.request.leader_id
        if leader_id is None or seq not in self._siblings.get(leader_id, ()):
            return
        self._siblings[leader_id].remove(seq)
        if not self._siblings[leader_id]:
            del self._siblings[leader_id]

    def _resume_paused(self) -> None:
        """Gives slots back to paused sequences that have credit again, before anyone new is admitted."""
        for seq in [seq for seq in self._paused if seq.credit > 0]:
            if len(self.running) >= self._max_num_seqs:
                break
            self._paused.remove(seq)
            self._run(seq)

    def _make_room_for_decodes(self) -> list[Preemption]:
        """Gives each decode, first to last, the page its token may need, preempting from the other end."""
        preempted: list[Preemption] = []
        for seq in list(self.running):
            while seq.state is SequenceState.RUNNING and not self._kv.grow(seq, len(seq.token_ids)):
                victim = self._paused_with_pages() or self.running[-1]
                preempted.append(self._preempt(victim))
        return preempted

    def _admit(self, seq: Sequence, preempted: list[Preemption]) -> Admission | None:
        """Gives the head of the line a slot and pages for all its tokens; None, and it stays there, if it cannot.

        Pages for the whole prompt, not only for its first chunk: half a prefill that is preempted is work lost.
        """
        num_queried = len(seq.token_ids) if self._kv.reads_cache(seq) else 0
        self._kv.acquire(seq)
        while not self._kv.grow(seq, len(seq.token_ids)):
            victim = self._paused_with_pages()
            if victim is None:
                self._kv.release(seq, publish=False)
                return None
            preempted.append(self._preempt(victim))
        self._line.remove(seq)
        is_resume = seq.state is SequenceState.PREEMPTED
        self._run(seq)
        return Admission(seq.seq_id, seq.num_cached, num_queried, is_resume)

    def _run(self, seq: Sequence) -> None:
        seq.state = SequenceState.RUNNING
        insort(self.running, seq, key=self._policy.rank)

    def _paused_with_pages(self) -> Sequence | None:
        """The paused sequence to lose its pages first: the last by rank."""
        return next((seq for seq in reversed(self._paused) if seq.state is not SequenceState.PREEMPTED), None)

    def _preempt(self, seq: Sequence) -> Preemption:
        """Takes a sequence's pages. What it computed is left in the cache, from where it may be evicted."""
        lost = seq.num_computed
        self._kv.release(seq, publish=True)
        seq.num_preemptions += 1
        place = self.running if seq.state is SequenceState.RUNNING else self._paused
        place.remove(seq)
        seq.state = SequenceState.PREEMPTED
        if seq.credit > 0:
            self._line.add(seq)
        else:
            insort(self._paused, seq, key=self._policy.rank)
        return Preemption(seq.seq_id, lost)
