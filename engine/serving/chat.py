"""/v1/chat/completions: messages through the chat template, answers in OpenAI's chat shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.errors import InvalidRequest
from inferdbg.engine.serving.chat_template import ChatPrompt
from inferdbg.engine.serving.choice_state import ChoiceState, Delta
from inferdbg.engine.serving.generation import (
    Plan,
    PromptLimits,
    clamp_logprob,
    finish_reason_of,
    prompt_logprobs_document,
    stop_reason_of,
)
from inferdbg.engine.serving.openai_protocol import ChatRequest, GenerationRequest, decode_body, sampling_of
from inferdbg.engine.serving.request_state import RequestState
from inferdbg.engine.serving.tokenize import Timed, TokenizedPrompt, TokenizerPool, Vocabulary

__all__ = ["ChatEndpoint", "ChatFormatter", "plain_messages"]


class ChatEndpoint:
    """Stateless; see `Endpoint`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def decode(self, body: bytes) -> ChatRequest:
        request = decode_body(body, ChatRequest)
        if request.chat_template is not None:
            raise InvalidRequest("a request may not bring its own chat_template", "chat_template")
        if request.functions:
            raise InvalidRequest("functions are not supported; use tools", "functions")
        if request.modalities is not None and request.modalities != ["text"]:
            raise InvalidRequest("only the text modality is supported", "modalities")
        if not (request.tool_choice is None or request.tool_choice in ("auto", "none")):
            raise InvalidRequest("tool_choice must be auto or none: calls cannot be forced", "tool_choice")
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
        continues = bool(request.continue_final_message)
        if continues and request.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        return request

    def check_size(self, body: GenerationRequest, limits: PromptLimits) -> None:
        limits.check_num_sequences(1, body.n)

    async def tokenize(self, body: GenerationRequest, pool: TokenizerPool) -> tuple[list[TokenizedPrompt], Timed]:
        assert isinstance(body, ChatRequest)
        prompt, timed = await pool.encode_chat(
            ChatPrompt(
                messages=plain_messages(body.messages),
                tools=body.tools if body.tool_choice != "none" else None,
                add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                arguments=body.chat_template_kwargs,
                add_special_tokens=bool(body.add_special_tokens),
            )
        )
        return [prompt], timed

    def sampling(self, body: GenerationRequest, context_left: int) -> SamplingParams:
        assert isinstance(body, ChatRequest)
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        return sampling_of(
            body,
            max_tokens=wanted,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            context_left=context_left,
        )

    def content_json(self, body: GenerationRequest) -> str | None:
        assert isinstance(body, ChatRequest)
        return msgspec.json.encode(body.messages).decode()

    def formatter(self, request_id: str, created: int, model: str, plan: Plan, vocabulary: Vocabulary) -> ChatFormatter:
        return ChatFormatter(request_id, created, model, plan, vocabulary)


class ChatFormatter:
    """See `Formatter`. There is one prompt, so a choice's index is its own."""

    def __init__(self, request_id: str, created: int, model: str, plan: Plan, vocabulary: Vocabulary) -> None:
        self._head = {"id": request_id, "created": created, "model": model}
        self._plan = plan
        self._vocabulary = vocabulary

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.is_first:
            role = {"index": delta.choice.choice_index, "delta": {"role": "assistant", "content": ""}}
            chunks.append(self._chunk([role | {"logprobs": None, "finish_reason": None}]))
            if delta.choice.choice_index == 0:  # which is not always the first to speak, and alone has the scores
                self._add_prompt(chunks[0], delta.choice)
        choice: dict[str, Any] = {
            "index": delta.choice.choice_index,
            "delta": {"content": delta.text} if delta.text or delta.finish_reason is None else {},
            "logprobs": self._logprobs(delta.choice, delta.first_token, delta.end_token),
            "finish_reason": finish_reason_of(delta.finish_reason),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = stop_reason_of(delta.choice)
        if self._plan.return_token_ids:
            choice["token_ids"] = delta.choice.output_ids[delta.first_token : delta.end_token]
        chunks.append(self._chunk([choice]))
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage}

    def response(self, request: RequestState, usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for choice in request.choices:
            entry: dict[str, Any] = {
                "index": choice.choice_index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice, 0, choice.num_output),
                "finish_reason": finish_reason_of(choice.finish_reason),
                "stop_reason": stop_reason_of(choice),
            }
            if self._plan.return_token_ids:
                entry["token_ids"] = choice.output_ids
            choices.append(entry)
        document = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}
        self._add_prompt(document, request.choices[0])
        return document

    def _add_prompt(self, document: dict[str, Any], choice: ChoiceState) -> None:
        prompt = self._plan.prompts[0]
        if self._plan.return_token_ids:
            document["prompt_token_ids"] = prompt
        if self._plan.sampling.prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs_document(prompt, choice.prompt_scores, self._vocabulary)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._plan.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, choice: ChoiceState, first: int, end: int) -> dict[str, Any] | None:
        wanted = self._plan.sampling.logprobs
        if wanted is None:
            return None
        entries = []
        for i in range(first, end):
            tops = range(i * choice.top_k, i * choice.top_k + min(wanted, choice.top_k))
            entry = self._logprob(choice.output_ids[i], choice.logprobs[i])
            entry["top_logprobs"] = [self._logprob(choice.top_ids[j], choice.top_logprobs[j]) for j in tops]
            entries.append(entry)
        return {"content": entries, "refusal": None}

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": clamp_logprob(logprob), "bytes": list(raw)}


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as one text, tool calls' arguments as objects.

    Raises:
        InvalidRequest: no messages, no role, or a content part that is not text.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty", "messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: dict[str, Any], param: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{param}.role must be a string", f"{param}.role")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{param}.content must be a string or a list of parts", f"{param}.content")
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise InvalidRequest(f"{param}.tool_calls must be a list", f"{param}.tool_calls")
        plain["tool_calls"] = [_plain_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif content is None:
        raise InvalidRequest(f"{param}.content is missing", f"{param}.content")
    return plain


def _part_text(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidRequest(f"{param}: only parts of type text are supported, {str(kind)[:40]!r} given", param)


def _plain_call(call: object, param: str) -> dict[str, Any]:
    """Clients send a call's arguments as a JSON string; templates iterate over an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequest(f"{param} must have a function", param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments else {}
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(f"{param}.function.arguments is not valid JSON", f"{param}.function") from None
    return {**call, "function": {**function, "arguments": arguments}}
