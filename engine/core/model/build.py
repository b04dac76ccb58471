"""Builds an engine on a real model from a configuration: device, threads, weights, pages, path, sampler."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedModel

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.admission import context_length
from inferdbg.engine.core.engine import Engine
from inferdbg.engine.core.events import CoreObserver
from inferdbg.engine.core.model.decode_graph import DecodeGraphs
from inferdbg.engine.core.model.families import FAMILIES
from inferdbg.engine.core.model.forward import Forward
from inferdbg.engine.core.model.invariant import InvariantForward
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.model.plain import PlainForward
from inferdbg.engine.core.model.runner import ModelRunner
from inferdbg.engine.core.model.warm_up import warm_up
from inferdbg.engine.core.model.weights import load_model
from inferdbg.engine.core.model_info import ModelInfo, read_model_info
from inferdbg.engine.core.sampler.sampler import Sampler
from inferdbg.engine.errors import EnvironmentLacks, UsageError

__all__ = ["build_engine", "build_engine_on"]

MAX_DERIVED_PAGES = 1 << 20  # a tiny model would otherwise get more pages than their bookkeeping is worth
Info = dict[str, str | int | float | bool | None]


def build_engine(config: CoreConfig, observer: CoreObserver) -> tuple[Engine, Info]:
    """Loads the model and returns an engine ready to step, with what a run's manifest says about it.

    Raises:
        ModelError: the checkpoint is absent, unsupported or corrupt.
        EnvironmentLacks: the device is not there, or its memory is too small.
        UsageError: settings that exclude one another.
    """
    device = _device(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    info = read_model_info(config.model_dir)
    model = load_model(config.model_dir, info, getattr(torch, config.dtype), device)
    return build_engine_on(config, observer, model, info)


def build_engine_on(
    config: CoreConfig, observer: CoreObserver, model: PreTrainedModel, info: ModelInfo
) -> tuple[Engine, Info]:
    """The same on a model that is in memory already, in the configuration's dtype and on its device."""
    device, dtype = _device(config), getattr(torch, config.dtype)
    num_pages = _num_pages(config, info, dtype)
    pool = KVPool(info, num_pages, config.page_size, dtype, device)
    forward = _forward(config, model, info, pool)
    graphs = None
    if config.decode_buckets and isinstance(forward, PlainForward):
        longest = min(context_length(config, info), num_pages * config.page_size)
        graphs = DecodeGraphs(forward, config.decode_buckets, -(-longest // config.page_size))
    runner = ModelRunner(forward, Sampler(info.vocab_size, info.eos_token_ids, device), graphs)
    engine = Engine(config, info, runner, observer, num_pages=num_pages)
    warm_up(runner, num_pages, config.page_size, engine.max_model_len)
    facts: Info = {
        "architecture": info.architecture,
        "vocab_size": info.vocab_size,
        "device": config.device,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": config.dtype,
        "num_threads": torch.get_num_threads(),
        "num_pages": num_pages,
        "page_size": config.page_size,
        "kv_bytes": (num_pages + 1) * KVPool.bytes_per_page(info, config.page_size, dtype),
        "max_model_len": engine.max_model_len,
        "forward": forward.name,
        "batch_invariant": config.batch_invariant,
        "decode_buckets": ",".join(map(str, sorted(set(config.decode_buckets)))) if graphs else None,
    }
    return engine, facts


def _device(config: CoreConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentLacks(
            "device cuda was asked for and torch finds no CUDA device here; use device cpu, or install a CUDA build of "
            "torch on a machine with a GPU"
        )
    return torch.device(config.device)


def _forward(config: CoreConfig, model: PreTrainedModel, info: ModelInfo, pool: KVPool) -> Forward:
    if config.batch_invariant:
        if config.decode_buckets:
            raise UsageError("batch_invariant pads every step itself: drop decode_buckets")
        if config.fast_path == "require":
            raise UsageError("batch_invariant runs on the plain path: use fast_path auto or off")
        return InvariantForward(model, pool)
    if config.decode_buckets:
        if config.fast_path == "require":
            raise UsageError("decode_buckets pad the plain path: use fast_path auto or off")
        if config.device == "cuda" and FAMILIES[info.architecture].experts:
            raise UsageError(f"decode_buckets are not proven for {info.architecture} on cuda: drop them")
        return PlainForward(model, pool)
    if config.fast_path != "off" and (fast := _fast_forward(config, model, info, pool)) is not None:
        return fast
    if config.fast_path == "require":
        raise UsageError(f"there is no fast path for {info.architecture} in {config.dtype} on {config.device}")
    return PlainForward(model, pool)


def _fast_forward(config: CoreConfig, model: PreTrainedModel, info: ModelInfo, pool: KVPool) -> Forward | None:
    from inferdbg.engine.core.model.fast import make_fast_forward  # it may compile kernels: only when asked for

    return make_fast_forward(model, info, pool, config)


def _num_pages(config: CoreConfig, info: ModelInfo, dtype: torch.dtype) -> int:
    """Pages of the configuration, or as many as `kv_memory_bytes` holds."""
    page_bytes = KVPool.bytes_per_page(info, config.page_size, dtype)
    if config.num_pages is not None:
        num_pages, origin = config.num_pages, "num_pages"
    else:
        num_pages, origin = min(config.kv_memory_bytes // page_bytes, MAX_DERIVED_PAGES), "kv_memory_bytes"
    if num_pages < 1:
        raise UsageError(
            f"kv_memory_bytes ({config.kv_memory_bytes}) does not hold one page of {page_bytes} bytes: raise it or "
            "lower page_size"
        )
    if config.max_model_len is not None and num_pages * config.page_size < context_length(config, info):
        needed = -(-config.max_model_len // config.page_size)
        raise UsageError(
            f"{num_pages} KV pages (from {origin}) do not hold one sequence of max_model_len "
            f"({config.max_model_len} tokens, {needed} pages, {needed * page_bytes} bytes): raise {origin} or lower "
            "max_model_len"
        )
    available = _memory_bytes(config)
    if (num_pages + 1) * page_bytes > available:
        raise EnvironmentLacks(
            f"{num_pages} KV pages need {(num_pages + 1) * page_bytes} bytes and {config.device} has {available}: "
            f"lower {origin}"
        )
    return num_pages


def _memory_bytes(config: CoreConfig) -> int:
    if config.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
