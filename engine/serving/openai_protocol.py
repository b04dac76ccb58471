"""The bodies of requests, in OpenAI's names and vLLM's additions, and what they ask of the sampler.

Wrong types are refused, unknown fields ignored; what is known and not supported is refused rather than ignored,
where ignoring it would change the answer. Knows nothing of tokenizers or of the core.
"""

from __future__ import annotations

import gc
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.errors import ContextLengthExceeded, InvalidRequest

__all__ = [
    "ChatRequest", "CompletionRequest", "DetokenizeRequest", "GenerationRequest", "StreamOptions", "TokenizeRequest",
    "decode_body", "sampling_of",
]  # fmt: skip

DEFAULT_MAX_TOKENS = 16
MAX_INT = 2**31 - 1
MAX_BIASED_TOKENS = 4096

Body = TypeVar("Body", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    """`stream_options` of a streamed request."""

    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and completions have in common. None means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    forced_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    # known, and refused when they ask for something
    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    modalities: list[str] | None = None
    functions: list[dict[str, Any]] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Parses a JSON body.

    Raises:
        InvalidRequest: it is not JSON, not valid UTF-8, too deeply nested, or a field has the wrong type.
    """
    try:
        with _no_collection():
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, param = _split_path(str(error))
        raise InvalidRequest(message, param) from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector from walking the heap over and over while a body becomes many objects.

    None of them is garbage yet; 300,000 empty lists took 350 ms of the event loop, and so take 20.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sampling_of(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, context_left: int
) -> SamplingParams:
    """The sampling a request asks for, its seed drawn where none is given (see `sequences.prompt_seed`).

    Without `max_tokens`, forced ids set it, else what is left of the context: all of it for chat, else at most 16.

    Raises:
        InvalidRequest: a value is out of range or not supported; `param` names it.
        ContextLengthExceeded: there are more forced ids than `context_left`.
    """
    _refuse_unsupported(request)
    # what is too long is told by its length, before it is walked through
    if (ids := request.forced_token_ids) is not None and len(ids) > context_left:
        raise ContextLengthExceeded(
            f"{len(ids)} forced_token_ids exceed what the prompt leaves of the context: {context_left} tokens",
            "forced_token_ids",
        )
    if (bias := request.logit_bias) is not None and len(bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"logit_bias may name {MAX_BIASED_TOKENS} tokens, {len(bias)} given", "logit_bias")
    forced = None if request.forced_token_ids is None else tuple(request.forced_token_ids)
    if max_tokens is None:
        if forced:
            max_tokens = len(forced)
        else:
            max_tokens = context_left if isinstance(request, ChatRequest) else min(DEFAULT_MAX_TOKENS, context_left)
            max_tokens = max(1, max_tokens)  # a prompt that leaves nothing is refused for its length
    for name in ("max_tokens", "top_k"):  # nothing else bounds them
        value = max_tokens if name == "max_tokens" else request.top_k
        if value is not None and value > MAX_INT:
            raise InvalidRequest(f"{name} must be at most {MAX_INT}, {value} given", name)
    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in (
            "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "logit_bias", "include_stop_str_in_output", "ignore_eos", "prompt_logprobs",
            "skip_special_tokens",
        )
        if getattr(request, name) is not None
    }  # fmt: skip
    stop = request.stop if request.stop is not None else ()
    return SamplingParams(
        max_tokens=max_tokens,
        seed=request.seed if request.seed is not None else secrets.randbits(63),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        forced_token_ids=forced,
        **given,
    )


def _refuse_unsupported(request: GenerationRequest) -> None:
    if request.response_format is not None and request.response_format.get("type", "text") != "text":
        raise InvalidRequest("response_format must be text: structured output is not supported", "response_format")
    for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(request, name) is not None:
            raise InvalidRequest("structured output is not supported", name)
    for name in ("truncate_prompt_tokens", "allowed_token_ids", "bad_words", "use_beam_search"):
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported", name)
    if request.best_of is not None and request.best_of != (request.n if request.n is not None else 1):
        raise InvalidRequest("best_of other than n is not supported", "best_of")


def _split_path(message: str) -> tuple[str, str | None]:
    """Takes msgspec's ``… - at `$.messages[0].role` `` apart into text and OpenAI's `param`."""
    found = re.search(r" - at (?:`key` in )?`\$\.?([^`]*)`$", message)
    if found is None:
        return message, None
    param = found[1] or None
    return (f"{param}: {message[: found.start()]}" if param else message[: found.start()]), param
