"""The engine's configuration: frozen, resolved once, torch-free. The only reader of environment variables
besides the command line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inferdbg.engine.errors import UsageError

__all__ = ["DTYPES", "MAX_PAGE_SIZE", "CoreConfig", "FrontConfig", "cache_dir"]

DTYPES = ("float64", "float32", "bfloat16")
MAX_PAGE_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """How one engine core runs its model.

    Raises:
        UsageError: a value is out of range.
    """

    model_dir: Path  # an ordinary checkpoint: config.json, *.safetensors, tokenizer files
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float64", "float32", "bfloat16"] = "bfloat16"
    num_threads: int | None = None  # None: torch's default
    max_model_len: int | None = None  # tokens of prompt and output; None: the model's own context
    max_num_seqs: int = 16  # sequences in one step (slots)
    token_budget: int = 512  # tokens computed in one step, prefill and decode together
    page_size: int = 16  # tokens per KV page
    num_pages: int | None = None  # None: what `kv_memory_bytes` holds
    kv_memory_bytes: int = 1 << 30
    prefix_cache: bool = True
    policy: str = "fcfs"
    batch_invariant: bool = False
    fast_path: Literal["auto", "off", "require"] = "auto"
    decode_buckets: tuple[int, ...] = ()  # batch sizes to pad decode steps to; empty: eager
    top_logprobs: int = 2  # runner-ups recorded per sampled token, whatever the request asks
    client_credit: int = 1024  # tokens a request may be ahead of its client before it is paused

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, {self.dtype!r} given")
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"device must be cpu or cuda, {self.device!r} given")
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise UsageError(f"page_size must lie between 1 and {MAX_PAGE_SIZE}, {self.page_size} given")
        for name in ("max_num_seqs", "token_budget", "kv_memory_bytes", "client_credit"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, {getattr(self, name)} given")
        for name in ("num_pages", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, {value} given")
        if self.token_budget < self.max_num_seqs:
            raise UsageError(
                f"token_budget ({self.token_budget}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "or running requests could starve each other"
            )
        if not 0 <= self.top_logprobs <= 20:
            raise UsageError(f"top_logprobs must lie between 0 and 20, {self.top_logprobs} given")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """How the HTTP front of one replica behaves."""

    model_name: str  # the id clients use
    model_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_key: str | None = None
    max_body_bytes: int = 8 << 20
    max_queued_requests: int = 1024  # accepted and not finished; beyond: 429
    max_batch_prompts: int = 256  # prompts in one completions request
    tokenizer_threads: int = 2
    stall_seconds: float = 30.0  # work waits and no step ends: /health fails
    slow_client_seconds: float = 60.0  # a client that takes no bytes for so long is aborted
    drain_seconds: float = 10.0
    keep_text: bool = False  # events carry prompts and messages as text, for a log that was asked to keep them


def cache_dir() -> Path:
    """Where pulled models live: ``$INFERDBG_CACHE``, else ``$XDG_CACHE_HOME/inferdbg``, else ``~/.cache/inferdbg``."""
    if explicit := os.environ.get("INFERDBG_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "inferdbg"
