"""/v1/completions: text or token-id prompts, one or many, answers in OpenAI's completion shapes."""

from __future__ import annotations

from typing import Any

from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.errors import InvalidRequest
from inferdbg.engine.serving.choice_state import ChoiceState, Delta
from inferdbg.engine.serving.generation import (
    Plan,
    PromptLimits,
    clamp_logprob,
    finish_reason_of,
    prompt_logprobs_document,
    stop_reason_of,
)
from inferdbg.engine.serving.openai_protocol import CompletionRequest, GenerationRequest, decode_body, sampling_of
from inferdbg.engine.serving.request_state import RequestState
from inferdbg.engine.serving.tokenize import Timed, TokenizedPrompt, TokenizerPool, Vocabulary

__all__ = ["CompletionEndpoint", "CompletionFormatter", "split_prompts"]


class CompletionEndpoint:
    """Stateless; see `Endpoint`."""

    path = "/v1/completions"
    id_prefix = "cmpl-"

    def decode(self, body: bytes) -> CompletionRequest:
        request = decode_body(body, CompletionRequest)
        if request.echo:
            raise InvalidRequest("echo is not supported; prompt_logprobs scores the prompt", "echo")
        if request.suffix:
            raise InvalidRequest("suffix is not supported", "suffix")
        return request

    def check_size(self, body: GenerationRequest, limits: PromptLimits) -> None:
        assert isinstance(body, CompletionRequest)
        prompt = body.prompt
        if not isinstance(prompt, list) or not prompt:
            limits.check_num_sequences(1, body.n)
        elif isinstance(prompt[0], int):  # one prompt of ids, unless it is mixed
            limits.check_length(len(prompt))
            limits.check_num_sequences(1, body.n)
        else:
            limits.check_num_sequences(len(prompt), body.n)
            for entry in prompt:
                if isinstance(entry, list):
                    limits.check_length(len(entry))

    async def tokenize(self, body: GenerationRequest, pool: TokenizerPool) -> tuple[list[TokenizedPrompt], Timed]:
        assert isinstance(body, CompletionRequest)
        prompts = split_prompts(body.prompt)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [TokenizedPrompt(tuple(ids), None) for ids in prompts if not isinstance(ids, str)], Timed(0, 0)
        encoded, timed = await pool.encode(texts, add_special_tokens=body.add_special_tokens is not False)
        remaining = iter(encoded)
        return [
            next(remaining) if isinstance(prompt, str) else TokenizedPrompt(tuple(prompt), None) for prompt in prompts
        ], timed

    def sampling(self, body: GenerationRequest, context_left: int) -> SamplingParams:
        assert isinstance(body, CompletionRequest)
        return sampling_of(body, max_tokens=body.max_tokens, logprobs=body.logprobs, context_left=context_left)

    def content_json(self, body: GenerationRequest) -> str | None:
        return None

    def formatter(
        self, request_id: str, created: int, model: str, plan: Plan, vocabulary: Vocabulary
    ) -> CompletionFormatter:
        return CompletionFormatter(request_id, created, model, plan, vocabulary)


class CompletionFormatter:
    """See `Formatter`. Choices are numbered over all prompts: prompt 0's first."""

    def __init__(self, request_id: str, created: int, model: str, plan: Plan, vocabulary: Vocabulary) -> None:
        self._head = {"id": request_id, "object": "text_completion", "created": created, "model": model}
        self._plan = plan
        self._vocabulary = vocabulary

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        choice = delta.choice
        entry = self._entry(choice, delta.text, delta.first_token, delta.end_token)
        entry["finish_reason"] = finish_reason_of(delta.finish_reason)
        if delta.is_first:
            self._add_prompt(entry, choice)
        chunk = {**self._head, "choices": [entry]}
        if self._plan.include_usage:
            chunk["usage"] = None
        return [chunk]

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def response(self, request: RequestState, usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for choice in request.choices:
            entry = self._entry(choice, choice.text, 0, choice.num_output)
            entry["finish_reason"] = finish_reason_of(choice.finish_reason)
            self._add_prompt(entry, choice)
            choices.append(entry)
        return {**self._head, "choices": choices, "usage": usage}

    def _entry(self, choice: ChoiceState, text: str, first: int, end: int) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": choice.prompt_index * self._plan.sampling.n + choice.choice_index,
            "text": text,
            "logprobs": self._logprobs(choice, first, end),
            "stop_reason": stop_reason_of(choice),
        }
        if self._plan.return_token_ids:
            entry["token_ids"] = choice.output_ids[first:end]
        return entry

    def _add_prompt(self, entry: dict[str, Any], choice: ChoiceState) -> None:
        prompt = self._plan.prompts[choice.prompt_index]
        if self._plan.return_token_ids:
            entry["prompt_token_ids"] = prompt
        if self._plan.sampling.prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs_document(prompt, choice.prompt_scores, self._vocabulary)

    def _logprobs(self, choice: ChoiceState, first: int, end: int) -> dict[str, Any] | None:
        wanted = self._plan.sampling.logprobs
        if wanted is None:
            return None
        name = self._vocabulary.token_text
        tops: list[dict[str, float]] = []
        for i in range(first, end):
            top: dict[str, float] = {}
            for j in range(i * choice.top_k, i * choice.top_k + min(wanted, choice.top_k)):
                # two ids may have one text: the likelier one is shown
                top.setdefault(name(choice.top_ids[j]), clamp_logprob(choice.top_logprobs[j]))
            top.setdefault(name(choice.output_ids[i]), clamp_logprob(choice.logprobs[i]))
            tops.append(top)
        return {
            "tokens": [name(token_id) for token_id in choice.output_ids[first:end]],
            "token_logprobs": [clamp_logprob(value) for value in choice.logprobs[first:end]],
            "top_logprobs": tops if wanted else None,
            "text_offset": choice.text_starts[first:end],
        }


def split_prompts(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    """The prompts of a request: one text, one list of ids, or a list of either.

    Raises:
        InvalidRequest: there is none, or ids and prompts are mixed.
    """
    if prompt is None:
        raise InvalidRequest("prompt is missing", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", "prompt")
    ids = [entry for entry in prompt if isinstance(entry, int)]
    if not ids:
        return [entry for entry in prompt if not isinstance(entry, int)]
    if len(ids) != len(prompt):
        raise InvalidRequest("prompt mixes token ids with prompts", "prompt")
    return [ids]
