"""Whether a sequence can be run at all, asked before it is queued. Knows limits, no state."""

from __future__ import annotations

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.model_info import ModelInfo
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.errors import ContextLengthExceeded, InvalidRequest, UsageError

__all__ = ["check_request", "context_length"]


def context_length(config: CoreConfig, model: ModelInfo) -> int:
    """Tokens of prompt and output together that the configuration allows.

    Raises:
        UsageError: it asks for more than the model has.
    """
    if config.max_model_len is None:
        return model.max_positions
    if config.max_model_len > model.max_positions:
        raise UsageError(
            f"max_model_len ({config.max_model_len}) exceeds the model's own context ({model.max_positions})"
        )
    return config.max_model_len


def check_request(request: SequenceRequest, model: ModelInfo, *, context: int, max_tokens_in_pages: int) -> int:
    """The length in tokens at which the sequence will end at the latest: max_tokens or the context is used up.

    `max_tokens_in_pages` is what all pages together hold. The last output token is never computed, so it needs no room.

    Raises:
        InvalidRequest: an id is out of range, or there is no prompt.
        ContextLengthExceeded: prompt and output do not fit.
    """
    sampling = request.sampling
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty", "prompt")
    _check_ids(request.prompt_ids, model.vocab_size, "prompt")
    _check_ids(sampling.stop_token_ids, model.vocab_size, "stop_token_ids")
    _check_ids(tuple(sampling.logit_bias), model.vocab_size, "logit_bias")
    _check_ids(sampling.forced_token_ids or (), model.vocab_size, "forced_token_ids")
    if num_prompt >= context:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens, which leaves no room for output in a context of {context}", "prompt"
        )
    num_output = sampling.max_tokens
    if sampling.forced_token_ids is not None:
        num_output = len(sampling.forced_token_ids)
        if num_prompt + num_output > context:
            raise ContextLengthExceeded(
                f"{num_prompt} prompt and {num_output} forced tokens exceed the context of {context}",
                "forced_token_ids",
            )
    max_total = min(num_prompt + num_output, context)
    if max_total - 1 > max_tokens_in_pages:
        raise ContextLengthExceeded(
            f"{num_prompt} prompt and up to {max_total - num_prompt} output tokens can never fit the KV cache, whose "
            f"pages hold {max_tokens_in_pages}; lower max_tokens, shorten the prompt or give the cache more memory",
            "max_tokens" if num_prompt < max_tokens_in_pages else "prompt",
        )
    return max_total


def _check_ids(ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"{param} holds token id {wrong}; the model's ids are 0 to {vocab_size - 1}", param)
