"""What one generation request needs, from its parsed body to the documents its client gets. Values and protocols.

`generate.py` drives it; `chat.py` and `completions.py` say how each endpoint reads its body and shapes its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inferdbg.engine.core.admission import check_prompt_length
from inferdbg.engine.core.events import FinishReason, PromptScores
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.errors import InvalidRequest
from inferdbg.engine.serving.choice_state import ChoiceState, Delta
from inferdbg.engine.serving.events import cached_prompt_tokens
from inferdbg.engine.serving.openai_protocol import GenerationRequest
from inferdbg.engine.serving.request_state import RequestState
from inferdbg.engine.serving.tokenize import Timed, TokenizedPrompt, TokenizerPool, Vocabulary

__all__ = [
    "Endpoint", "Formatter", "Plan", "PromptLimits", "clamp_logprob", "finish_reason_of", "prompt_logprobs_document",
    "stop_reason_of", "usage_document",
]  # fmt: skip

MIN_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request whose prompts are tokenized and whose parameters are valid."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams  # seed resolved
    is_seeded: bool  # the client gave the seed
    stream: bool
    include_usage: bool
    return_token_ids: bool
    cache_salt: str | None
    messages_json: str | None
    prompt_text: str | None

    @property
    def wants_tokens(self) -> bool:
        """Whether ids or logprobs are returned, so that a chunk may be due without text."""
        return self.return_token_ids or self.sampling.logprobs is not None


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What can be told of prompts by counting, before they are tokenized or their ids looked at."""

    max_sequences: int  # of one request: prompts times n
    max_model_len: int  # tokens of prompt and output

    def check_num_sequences(self, num_prompts: int, n: int | None) -> None:
        """Raises `InvalidRequest` for too many."""
        n = 1 if n is None else n
        if num_prompts * n > self.max_sequences:
            raise InvalidRequest(
                f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences; the limit is {self.max_sequences}",
                "prompt" if num_prompts > 1 else "n",
            )

    def check_length(self, num_prompt: int) -> None:
        """Raises `ContextLengthExceeded` for a prompt that leaves no room for output."""
        check_prompt_length(num_prompt, self.max_model_len)


class Formatter(Protocol):
    """Shapes the answers of one request."""

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The stream's documents for what is new of a choice."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]: ...

    def response(self, request: RequestState, usage: dict[str, Any]) -> dict[str, Any]: ...


class Endpoint(Protocol):
    """One generation endpoint."""

    path: str
    id_prefix: str

    def decode(self, body: bytes) -> GenerationRequest:
        """Parses the body; raises `InvalidRequest`."""
        ...

    def check_size(self, body: GenerationRequest, limits: PromptLimits) -> None:
        """Refuses too many prompts, and too long ones of ids, without walking through any."""
        ...

    async def tokenize(self, body: GenerationRequest, pool: TokenizerPool) -> tuple[list[TokenizedPrompt], Timed]: ...

    def sampling(self, body: GenerationRequest, context_left: int) -> SamplingParams: ...

    def content_json(self, body: GenerationRequest) -> str | None:
        """What the client sent as messages, for a log that was asked to keep text."""
        ...

    def formatter(self, request_id: str, created: int, model: str, plan: Plan, vocabulary: Vocabulary) -> Formatter: ...


def finish_reason_of(reason: FinishReason | None) -> str | None:
    """OpenAI's word. Forced ids used up are a length that was reached: the model did not choose to stop."""
    match reason:
        case None:
            return None
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH | FinishReason.FORCED:
            return "length"
        case FinishReason.ABORT | FinishReason.ERROR:
            return "error"


def stop_reason_of(choice: ChoiceState) -> str | int | None:
    """vLLM's `stop_reason`: the stop string, or the id of the stop token; null for EOS and length."""
    matched = choice.stop_matched
    if isinstance(matched, int) and matched not in choice.sampling.stop_token_ids:
        return None
    return matched


def usage_document(prompts: Sequence[Sequence[int]], choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """Token counts of ids as logged: prompts once each however many choices, outputs with EOS and stop tokens."""
    prompt_tokens = sum(len(ids) for ids in prompts)
    completion_tokens = sum(choice.num_output for choice in choices)
    cached = cached_prompt_tokens((choice.choice_index, choice.cached_tokens) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def prompt_logprobs_document(
    prompt_ids: Sequence[int], scores: PromptScores | None, vocabulary: Vocabulary
) -> list[dict[str, Any] | None] | None:
    """vLLM's form: null for the first token, then {token id: {logprob, rank, decoded_token}} per token."""
    if scores is None:
        return None
    entries: list[dict[str, Any] | None] = [None]
    for i, logprob in enumerate(scores.logprobs):
        token_id = prompt_ids[i + 1]
        top = range(i * scores.k, (i + 1) * scores.k)
        ranks = {scores.top_ids[j]: rank for rank, j in enumerate(top, start=1)}
        candidates = {token_id: logprob} | {scores.top_ids[j]: scores.top_logprobs[j] for j in top}
        entries.append(
            {
                str(candidate): {
                    "logprob": clamp_logprob(value),
                    "rank": ranks.get(candidate),
                    "decoded_token": vocabulary.token_text(candidate),
                }
                for candidate, value in candidates.items()
            }
        )
    return entries


def clamp_logprob(value: float) -> float:
    """A log-probability that JSON can carry."""
    return max(value, MIN_LOGPROB)
