"""What the engine core states about itself: plain facts, in columns. Torch-free.

The core calls one `Observer` at one place, at the end of `Engine.step()`. To see something new, add a
field here, not a call there. All times are integer ns of CLOCK_MONOTONIC. A field that does not apply is
None or empty, never made up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "CoreEvent",
    "CoreObserver",
    "FinishReason",
    "PromptScores",
    "StepFailed",
    "StepRecord",
    "WaitReason",
]


class FinishReason(StrEnum):
    """Why a sequence ended. `STOP` and `LENGTH` are OpenAI's words."""

    STOP = "stop"  # EOS, a stop token, or (decided by the front) a stop string
    LENGTH = "length"  # max_tokens are used up
    FORCED = "forced"  # forced_token_ids are used up
    ABORT = "abort"
    ERROR = "error"


class WaitReason(StrEnum):
    """What keeps a waiting sequence out of the running batch, as the last step's scheduler saw it."""

    SLOTS = "slots"  # max_num_seqs are running
    PAGES = "pages"  # the KV pages it needs are not free
    BUDGET = "budget"  # the step's token budget was used up
    ORDER = "order"  # behind a sequence that is blocked (the head of the line)
    SIBLING = "sibling"  # waits for the first choice of its request to finish the shared prefill
    CREDIT = "credit"  # paused: its client has not taken the tokens sent so far


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of one sequence's prompt tokens, sent once, with the step that ended its prefill.

    Entry i scores prompt token i + 1 given tokens 0..i; so there are ``len(prompt) - 1`` entries.
    `top_ids` and `top_logprobs` have k per entry, best first, flattened.
    """

    seq_id: int
    logprobs: tuple[float, ...]
    k: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One engine step. Columns of equal prefix (`chunk_`, `sampled_`, …) are parallel.

    The stages follow one another: start | schedule | prepare | execute | sample | publish | end.
    `idle_ns` is the gap between the end of the previous step and this start; `handoff_ns` is the share of that
    gap in which the previous record was handed to the observer.
    """

    step: int
    start_ns: int
    idle_ns: int
    handoff_ns: int
    schedule_ns: int
    prepare_ns: int
    execute_ns: int
    sample_ns: int
    publish_ns: int

    # one entry per sequence that computed something; positions [start, start + len) of the sequence
    chunk_seq_ids: tuple[int, ...]
    chunk_starts: tuple[int, ...]
    chunk_lens: tuple[int, ...]
    chunk_is_prefill: tuple[bool, ...]  # False: one decode token (or its re-computation in the same batch shape)

    # one entry per sampled token, in batch order
    sampled_seq_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    sampled_top_k: int  # alternatives per sampled token in the two columns below
    sampled_top_ids: tuple[int, ...]
    sampled_top_logprobs: tuple[float, ...]
    prompt_scores: tuple[PromptScores, ...]

    # first admissions and re-admissions after a preemption
    admitted_seq_ids: tuple[int, ...]
    admitted_cached: tuple[int, ...]  # tokens found in the prefix cache
    admitted_is_resume: tuple[bool, ...]
    preempted_seq_ids: tuple[int, ...]
    preempted_lost: tuple[int, ...]  # computed tokens thrown away (found again in the cache or not)
    finished_seq_ids: tuple[int, ...]
    finished_reasons: tuple[FinishReason, ...]

    num_running: int  # after this step
    waiting_reasons: tuple[WaitReason, ...]  # one entry per reason that occurs
    waiting_requests: tuple[int, ...]
    waiting_tokens: tuple[int, ...]  # tokens still to be computed before their next output
    oldest_waiting_ns: int | None  # enqueue time of the oldest waiting sequence
    token_budget: int

    pages_free: int
    pages_used: int  # held by at least one sequence
    pages_cached: int  # in the prefix cache, held by none
    prefix_queried_tokens: int  # of the admissions of this step
    prefix_hit_tokens: int
    evicted_pages: int

    graph_bucket: int | None  # rows the decode batch was padded to; None: eager
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None

    @property
    def end_ns(self) -> int:
        """When the record was complete, monotonic ns."""
        return self.sampled_ns + self.publish_ns

    @property
    def sampled_ns(self) -> int:
        """When the sampled token ids were known, monotonic ns."""
        return self.start_ns + self.schedule_ns + self.prepare_ns + self.execute_ns + self.sample_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A step that raised. `seq_ids` are ended with `ERROR`: all of the step's, or those at fault where these are known.

    The engine goes on with the others.
    """

    step: int
    time_ns: int
    stage: str  # schedule, prepare, execute, sample, publish
    error: str  # type and message, no prompt text
    seq_ids: tuple[int, ...]


CoreEvent = StepRecord | StepFailed
CoreObserver = Callable[[CoreEvent], None]
