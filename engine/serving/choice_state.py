"""One choice of one prompt while it runs: its tokens, its text, and what of them the client has.

Fed by the dispatcher with columns of step records; read by the endpoint that answers. Torch-free, does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from inferdbg.engine.core.events import FinishReason, PromptScores
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.serving.detokenize import IncrementalDetokenizer, StopMatch, StopMatcher
from inferdbg.engine.serving.events import Boundaries, ChoiceRecord

__all__ = ["ChoiceState", "Delta"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a choice since the client was last sent something."""

    choice: ChoiceState
    text: str
    first_token: int  # tokens [first_token, end_token) belong to this delta
    end_token: int
    is_first: bool
    finish_reason: FinishReason | None


class ChoiceState:
    """Grows with `push_token` until `is_done`; what comes later is ignored, so a record is deterministic.

    Tokens:  [0 … num_sent)      the client has them
             [num_sent … n)      to be sent; those whose text is held back (it may begin a stop string) wait with it
    """

    def __init__(
        self,
        *,
        prompt_index: int,
        choice_index: int,
        seq_id: int,
        sampling: SamplingParams,
        detokenizer: IncrementalDetokenizer,
        top_k: int,
    ) -> None:
        self.prompt_index = prompt_index
        self.choice_index = choice_index
        self.seq_id = seq_id
        self.sampling = sampling
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_k = top_k  # alternatives kept per token
        self.top_ids: list[int] = []
        self.top_logprobs: list[float] = []
        self.token_times_ns: list[int] = []
        self.token_steps: list[int] = []
        self.text_starts: list[int] = []  # characters of text decoded before each token
        self.finish_reason: FinishReason | None = None
        self.stop_matched: str | int | None = None  # the stop string, or the id of a stop token or EOS
        self.cached_tokens: int | None = None
        self.num_preemptions = 0
        self.requeue_ns = 0
        self.prompt_scores: PromptScores | None = None
        self.admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.text_ready_ns: int | None = None
        self.first_text_ns: int | None = None
        self.sent_ns: int | None = None
        self.is_done = False  # the core, or a stop string, has ended it; no more tokens are taken
        self.credit_left = 0  # tokens the core may still send before it is granted more
        self.num_taken = 0  # tokens that keep nobody waiting: sent, or held back for text that is still to come
        self.num_granted = 0  # of those, what the core was told of
        self._detokenizer = detokenizer
        # forced ids override every stop
        self._matcher = StopMatcher(
            () if sampling.forced_token_ids is not None else sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
        )
        self._pieces: list[str] = []
        self._num_decoded = 0  # characters out of the detokenizer
        self._num_shown = 0  # characters past the stop matcher
        self._num_sent = 0
        self._unsent: list[str] = []
        self._sent_first = False
        self._sent_finish = False
        self._preempted_ns: int | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def has_text(self) -> bool:
        return bool(self._pieces)

    @property
    def num_output(self) -> int:
        return len(self.output_ids)

    @property
    def is_sent(self) -> bool:
        """Whether the last delta has been taken."""
        return self._sent_finish

    def admit(self, cached_tokens: int, time_ns: int) -> None:
        """The scheduler took it into a step, for the first time or after a preemption."""
        if self._preempted_ns is not None:
            self.requeue_ns += max(0, time_ns - self._preempted_ns)
            self._preempted_ns = None
        if self.admitted_ns is None:
            self.admitted_ns = time_ns
            self.cached_tokens = cached_tokens

    def preempt(self, time_ns: int) -> None:
        self.num_preemptions += 1
        self._preempted_ns = time_ns

    def push_token(
        self,
        token_id: int,
        logprob: float,
        top_ids: Seq[int],
        top_logprobs: Seq[float],
        *,
        step: int,
        time_ns: int,
        finish: FinishReason | None,
    ) -> None:
        """Takes a sampled token; `finish` if the core ended the sequence with it."""
        self.output_ids.append(token_id)
        self.logprobs.append(logprob)
        if len(self.output_ids) == 1:  # a vocabulary may be smaller than what was asked for
            self.top_k = min(self.top_k, len(top_ids))
        self.top_ids.extend(top_ids[: self.top_k])
        self.top_logprobs.extend(top_logprobs[: self.top_k])
        self.token_times_ns.append(time_ns)
        self.token_steps.append(step)
        self.text_starts.append(self._num_decoded)
        if self.first_token_ns is None:
            self.first_token_ns = time_ns
        self.last_token_ns = time_ns
        self.credit_left -= 1
        is_stop_token = finish is FinishReason.STOP
        if is_stop_token:
            self.stop_matched = token_id
        if not is_stop_token or self.sampling.include_stop_str_in_output:
            self._show(self._detokenizer.push(token_id))
        if finish is not None and not self.is_done:
            self.finish(finish)

    def finish(self, reason: FinishReason) -> None:
        """No more tokens will come. What the detokenizer and the matcher held back is shown now."""
        if self.is_done:
            return
        self._show(self._detokenizer.finish())
        if self.is_done:  # the rest held a stop string
            return
        self._append(self._matcher.finish())
        self.finish_reason = reason
        self.is_done = True

    def take_delta(self, *, with_tokens: bool) -> Delta | None:
        """What the client does not have yet, if it is worth a message. `with_tokens`: ids or logprobs are wanted."""
        if self._sent_finish:
            return None
        self.num_taken = self.num_output
        text = "".join(self._unsent)
        first = self._num_sent
        end = self.num_output if self.is_done else self._num_showable()
        if not (text or self.is_done or (with_tokens and end > first)):
            return None
        self._unsent.clear()
        self._num_sent = end
        is_first, self._sent_first = not self._sent_first, True
        self._sent_finish = self.is_done
        return Delta(self, text, first, end, is_first, self.finish_reason)

    def to_record(self, request: Boundaries) -> ChoiceRecord:
        """The row of the token log; `request` says when it was received, parsed and tokenized."""
        assert self.sampling.seed is not None, "the front resolves seeds"
        return ChoiceRecord(
            prompt_index=self.prompt_index,
            choice_index=self.choice_index,
            seq_id=self.seq_id,
            seed=self.sampling.seed,
            output_ids=tuple(self.output_ids),
            output_logprobs=tuple(self.logprobs),
            top_k=self.top_k if self.output_ids else 0,
            top_ids=tuple(self.top_ids),
            top_logprobs=tuple(self.top_logprobs),
            token_times_ns=tuple(self.token_times_ns),
            token_steps=tuple(self.token_steps),
            finish_reason=self.finish_reason,
            stop_matched=None if self.stop_matched is None else str(self.stop_matched),
            cached_tokens=self.cached_tokens,
            num_preemptions=self.num_preemptions,
            requeue_ns=self.requeue_ns,
            boundaries=Boundaries(
                received_ns=request.received_ns,
                parsed_ns=request.parsed_ns,
                tokenized_ns=request.tokenized_ns,
                admitted_ns=self.admitted_ns,
                first_token_ns=self.first_token_ns,
                last_token_ns=self.last_token_ns if self.is_done else None,
                text_ready_ns=self.text_ready_ns if self.is_done else None,
                sent_ns=self.sent_ns if self.is_done else None,
            ),
            output_text=self.text,
            prompt_scores=self.prompt_scores,
        )

    def _show(self, piece: str) -> None:
        self._num_decoded += len(piece)
        if self.num_output < self.sampling.min_tokens:
            self._append(self._matcher.pass_through(piece))
            return
        shown = self._matcher.push(piece)
        if isinstance(shown, StopMatch):
            self._append(shown.text)
            self.stop_matched = shown.stop
            self.finish_reason = FinishReason.STOP
            self.is_done = True
        else:
            self._append(shown)

    def _append(self, text: str) -> None:
        if text:
            self._num_shown += len(text)
            self._pieces.append(text)
            self._unsent.append(text)

    def _num_showable(self) -> int:
        """Tokens none of whose text is held back: a token's logprobs show its text, so they wait with it."""
        end = self.num_output
        while end > self._num_sent and self._text_end(end - 1) > self._num_shown:
            end -= 1
        return end

    def _text_end(self, token_index: int) -> int:
        if token_index + 1 < self.num_output:
            return self.text_starts[token_index + 1]
        return self._num_decoded
