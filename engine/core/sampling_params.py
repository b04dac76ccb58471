"""What a request asks of the sampler, validated once at the door. Torch-free.

Knows nothing of tokens' text: stop *strings* are carried for the front, which matches them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from inferdbg.engine.errors import InvalidRequest

__all__ = [
    "MAX_LOGPROBS", "MAX_N", "MAX_REPETITION_PENALTY", "MAX_STOP_STRINGS", "MIN_REPETITION_PENALTY", "SamplingParams",
]  # fmt: skip

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_SEED = 2**63 - 1
# Beyond these a repeated token is as good as forced or forbidden already; far beyond, its logit overflows.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling; the defaults are OpenAI's, greedy is ``temperature=0``.

    Order of application, as in vLLM: `logit_bias`, then min_tokens (EOS and stop tokens are masked), then
    repetition, presence and frequency penalties, then temperature, then min_p, top_k, top_p.
    Recorded logprobs are raw: fp32 log-softmax of the model's logits, before all of that.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None  # None: drawn by the front and recorded
    repetition_penalty: float = 1.0  # over prompt and output; 0.01 to 100
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives returned per output token; 0: the sampled one alone
    prompt_logprobs: int | None = None
    forced_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        self._check_stops()
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_float("logit_bias", bias, -100.0, 100.0)
        if self.forced_token_ids is not None:
            self._check_forced(self.forced_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, {len(self.stop)} given", "stop")
        if any(not s for s in self.stop):
            raise InvalidRequest("a stop string must not be empty", "stop")
        if any(len(s) > MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest(f"a stop string may have at most {MAX_STOP_CHARS} characters", "stop")
        if len(self.stop_token_ids) > MAX_STOP_STRINGS * 16:
            raise InvalidRequest(
                f"at most {MAX_STOP_STRINGS * 16} stop token ids, {len(self.stop_token_ids)} given",
                "stop_token_ids",
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)

    def _check_forced(self, forced: tuple[int, ...]) -> None:
        if not forced:
            raise InvalidRequest("forced_token_ids must not be empty", "forced_token_ids")
        if self.n != 1:
            raise InvalidRequest(f"forced_token_ids needs n=1, {self.n} given", "n")
        if self.max_tokens < len(forced):
            raise InvalidRequest(
                f"max_tokens ({self.max_tokens}) is smaller than the {len(forced)} forced_token_ids",
                "max_tokens",
            )
        for token_id in forced:
            _check_int("forced_token_ids", token_id, 0)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, {type(value).__name__} given", name)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {span}, {value} given", name)


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, {value!r} given", name)
    if value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must lie in {bracket}{low}, {high}], {value} given", name)
