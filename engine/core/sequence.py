"""A sequence: one prompt and one choice of output, from submission to its end. Torch-free.

`SequenceRequest` is the immutable order; `Sequence` is the core's own state of it. A client's request with n
choices or several prompts becomes several sequences at the front; the core never learns of more.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from inferdbg.engine.core.sampling_params import SamplingParams

__all__ = ["Sequence", "SequenceRequest", "SequenceState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence as the front orders it. The front has validated it against the model.

    `sampling.seed` is set: the front draws one where the client gave none. `sampling.n` is not looked at.
    """

    seq_id: int  # unique within a core's life, ascending
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    choice_index: int = 0
    leader_id: int | None = None  # the sequence (choice 0) whose prefill this one waits for, to share it
    cache_salt: str | None = None
    arrival_ns: int = 0  # when the front enqueued it, monotonic


class SequenceState(Enum):
    """Where a sequence is. PREEMPTED waits like WAITING does, in front of it."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """The core's state of one sequence. The scheduler and the engine are the only writers.

    Token positions:  [0 … num_computed)  KV is in `pages`
                      [num_computed … len(token_ids))  to be computed, in one or several chunks
    When the last token of `token_ids` has been computed, the next one is sampled.

    Pages:            [0 … num_shared)  in the prefix cache, perhaps read by others too: never written again
                      [num_shared … len(pages))  this sequence's alone
    """

    request: SequenceRequest
    token_ids: list[int]  # prompt, then output
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    pages: array[int] = field(default_factory=lambda: array("q"))  # page i: positions [i, i + 1) * page_size
    num_shared: int = 0
    num_cached: int = 0  # tokens found in the prefix cache at the last admission
    num_preemptions: int = 0
    credit: int = 0  # tokens that may still be sampled before the client has taken some
    max_total: int = 0  # tokens of prompt and output at which it ends
    stop_ids: frozenset[int] = frozenset()  # sampled tokens that end it: EOS and the request's own

    @classmethod
    def from_request(
        cls, request: SequenceRequest, credit: int, *, max_total: int, eos_token_ids: frozenset[int]
    ) -> Sequence:
        """A sequence about to wait. Forced tokens end it when they are used up, and nothing else does before."""
        sampling = request.sampling
        stop_ids: frozenset[int] = frozenset()
        if sampling.forced_token_ids is None:
            stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)
        return cls(
            request=request,
            token_ids=list(request.prompt_ids),
            credit=credit,
            max_total=max_total,
            stop_ids=stop_ids,
        )

    @property
    def seq_id(self) -> int:
        return self.request.seq_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_decode(self) -> bool:
        """Its next chunk is one token, with all earlier positions computed and some output there already."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed == 1 and num_tokens > len(self.request.prompt_ids)

    @property
    def needs_prompt_scores(self) -> bool:
        """Every prompt token's logits are still wanted, so none may come from the prefix cache."""
        return self.request.sampling.prompt_logprobs is not None and self.num_output == 0
