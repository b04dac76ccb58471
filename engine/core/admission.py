"""Whether a sequence can be run at all, asked before it is queued. Knows limits, no state. Torch-free: the front asks
the same question before the core does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.model_info import ModelInfo
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.errors import ContextLengthExceeded, InvalidRequest, UsageError

__all__ = ["check_prompt_length", "check_request", "context_length"]


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


def check_request(prompt_ids: Sequence[int], sampling: SamplingParams, *, vocab_size: int, max_model_len: int) -> int:
    """The length in tokens, prompt and output, at which a sequence ends at the latest.

    The one rule of the front and the core: what was asked for fits, or it is refused, as vLLM does; output is never
    cut short at the context. `max_model_len` is what one sequence can have, `Engine.max_model_len`.

    Raises:
        InvalidRequest: an id is out of range, or there is no prompt.
        ContextLengthExceeded: prompt and output do not fit.
    """
    num_prompt = len(prompt_ids)
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
    forced = sampling.forced_token_ids
    _check_ids(prompt_ids, vocab_size, "prompt")
    _check_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    _check_ids(sampling.logit_bias, vocab_size, "logit_bias")
    _check_ids(forced or (), vocab_size, "forced_token_ids")
    check_prompt_length(num_prompt, max_model_len)
    num_output = sampling.max_tokens if forced is None else len(forced)
    if num_prompt + num_output > max_model_len:
        asked = f"max_tokens={num_output}" if forced is None else f"{num_output} forced_token_ids"
        raise ContextLengthExceeded(
            f"the prompt's {num_prompt} tokens and {asked} exceed the context of {max_model_len} tokens",
            "max_tokens" if forced is None else "forced_token_ids",
        )
    return num_prompt + num_output


def check_prompt_length(num_prompt: int, max_model_len: int) -> None:
    """Raises `ContextLengthExceeded` for a prompt that leaves no room for output."""
    if num_prompt >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens, which leaves no room for output in a context of {max_model_len}",
            "prompt",
        )


def _check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        # where, not which: messages are logged where ids are not
        position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"entry {position} of {param} is no id of this model; ids are 0 to {vocab_size - 1}", param
        )
