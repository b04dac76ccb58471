"""Padded decode steps give what unpadded ones give, and touch no page but the scratch page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, VOCAB, info_of, tiny_model
from workloads import random_config, random_plan, run_plan

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.model.build import build_engine_on
from inferdbg.engine.core.model.decode_graph import DecodeGraphs, width_buckets
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.model.plain import PlainForward
from inferdbg.engine.core.runner import StepBatch
from inferdbg.engine.errors import UsageError

PAGE_SIZE = 4


def decode_batch(pages: list[list[int]], context_lens: list[int]) -> StepBatch:
    num = len(pages)
    tables = np.zeros((num, max(map(len, pages))), dtype=np.int64)
    for row, own in zip(tables, pages, strict=True):
        row[: len(own)] = own
    lens = np.array(context_lens)
    last = lens - 1
    return StepBatch(
        token_ids=np.arange(num) % VOCAB,
        positions=last,
        slots=tables[np.arange(num), last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE,
        query_starts=np.arange(num + 1),
        context_lens=lens,
        page_tables=tables,
        logits_rows=np.arange(num),
        num_decodes=num,
    )


def filled_pool(model: Any, num_pages: int) -> KVPool:
    pool = KVPool(info_of(model), num_pages, PAGE_SIZE, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for layer in (*pool.keys, *pool.values):
        layer.copy_(torch.randn(layer.shape, generator=generator, dtype=layer.dtype))
    return pool


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_equals_unpadded(name: str) -> None:
    model = tiny_model(name)
    batch = decode_batch([[3], [0, 7, 5], [9, 1]], [2, 11, 8])
    plain_pool, padded_pool = filled_pool(model, 10), filled_pool(model, 10)
    expected = PlainForward(model, plain_pool).logits(batch)
    graphs = DecodeGraphs(PlainForward(model, padded_pool), (1, 8), max_pages=6)
    bucket = graphs.bucket_of(batch)
    assert bucket == 8
    got = graphs.logits(batch, bucket)
    assert got.shape == expected.shape
    assert (got - expected).abs().max().item() < 1e-12
    for plain, padded in zip(plain_pool.keys + plain_pool.values, padded_pool.keys + padded_pool.values, strict=True):
        assert (plain[:-1] - padded[:-1]).abs().max().item() < 1e-12, "padding reached a page that is not its own"


def test_buffers_do_not_remember_the_last_step() -> None:
    model = tiny_model("llama")
    pool = filled_pool(model, 10)
    forward = PlainForward(model, pool)
    graphs = DecodeGraphs(forward, (4,), max_pages=6)
    graphs.logits(decode_batch([[1, 2, 3, 4]] * 1 + [[5]] * 1 + [[6]] * 1 + [[7]], [16, 4, 4, 4]), 4)
    batch = decode_batch([[8]], [3])
    got = graphs.logits(batch, 4).clone()
    assert (got - forward.logits(batch)).abs().max().item() < 1e-12


def test_only_steps_of_decodes_that_fit_get_a_bucket() -> None:
    model = tiny_model("llama")
    graphs = DecodeGraphs(PlainForward(model, filled_pool(model, 10)), (2, 4), max_pages=2)
    assert graphs.bucket_of(decode_batch([[1]], [3])) == 2
    assert graphs.bucket_of(decode_batch([[1]] * 3, [3] * 3)) == 4
    assert graphs.bucket_of(decode_batch([[1]] * 5, [3] * 5)) is None
    assert graphs.bucket_of(decode_batch([[1, 2, 3]], [9])) is None
    prefill = decode_batch([[1]], [1])
    object.__setattr__(prefill, "num_decodes", 0)
    assert graphs.bucket_of(prefill) is None


@pytest.mark.parametrize(("max_pages", "widths"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))])
def test_width_buckets_end_at_the_longest(max_pages: int, widths: tuple[int, ...]) -> None:
    assert width_buckets(max_pages) == widths


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_engine_with_buckets_says_what_it_says_without(seed: int) -> None:
    plan = random_plan(seed)
    config = random_config(seed, plan)
    eager, eager_totals = run_plan(tiny_model("qwen3"), config, plan)
    padded, totals = run_plan(
        tiny_model("qwen3"), random_config(seed, plan, decode_buckets=(1, 3, 8), num_pages=config.num_pages), plan
    )
    assert {i: o.token_ids for i, o in padded.items()} == {i: o.token_ids for i, o in eager.items()}
    assert eager_totals.buckets == {None}
    assert totals.buckets & {1, 3, 8}


def test_fast_path_and_buckets_exclude_each_other() -> None:
    model = tiny_model("llama")
    config = CoreConfig(model_dir=Path(), dtype="float64", num_pages=8, decode_buckets=(4,), fast_path="require")
    with pytest.raises(UsageError, match="decode_buckets"):
        build_engine_on(config, lambda event: None, model, info_of(model))
