"""With batch_invariant, a request's tokens and logprobs are bitwise the same alone and in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, VOCAB, info_of, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM
from workloads import Outcome, Planned, random_config, random_plan, run_plan

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.model import invariant
from inferdbg.engine.core.model.build import build_engine_on
from inferdbg.engine.errors import EnvironmentLacks, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEEDS = (1, 2, 3)


def alone(model: Any, planned: Planned, **settings: Any) -> Outcome:
    """One request by itself: whole prefill in one step, roomy pages, nothing cached before."""
    config = CoreConfig(
        model_dir=Path(), page_size=16, num_pages=64, token_budget=256, fast_path="off", prefix_cache=False, **settings
    )
    request = replace(planned.request, leader_id=None)
    outcomes, _ = run_plan(model, config, [replace(planned, request=request, arrival=0, abort_after=None)])
    return outcomes[request.seq_id]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_alone_equals_in_company(name: str, dtype: str) -> None:
    model = tiny_model(name, DTYPES[dtype])
    preemptions = cached = chunked = 0
    for seed in SEEDS if name == "llama" else SEEDS[:1]:
        plan = random_plan(seed, num_requests=6, sampled=True, aborts=False)
        settings: dict[str, Any] = {"dtype": dtype, "batch_invariant": True}
        outcomes, totals = run_plan(model, random_config(seed, plan, **settings), plan)
        for planned in plan:
            assert outcomes[planned.request.seq_id] == alone(model, planned, **settings)
        preemptions += totals.preemptions
        cached += totals.cached_tokens
        chunked += totals.chunked
    if name == "llama":
        assert min(preemptions, cached, chunked) > 0


def test_long_contexts_span_kv_tiles() -> None:
    """Neighbours in another KV tile than one's own are walked over without a trace."""
    model = tiny_model("gpt-oss", torch.float32)
    settings: dict[str, Any] = {"dtype": "float32", "batch_invariant": True}
    requests = [
        planned for planned in random_plan(5, 4, aborts=False, sampled=True) if planned.request.leader_id is None
    ]
    plan = [
        replace(planned, request=replace(planned.request, prompt_ids=(planned.request.prompt_ids * 200)[:length]))
        for planned, length in zip(requests, (3, 200, 100, 140), strict=False)
    ]
    assert max(len(planned.request.prompt_ids) for planned in plan) > invariant.KV_TILE
    outcomes, _ = run_plan(model, random_config(5, plan, **settings), plan)
    for planned in plan:
        assert outcomes[planned.request.seq_id] == alone(model, planned, **settings)


def test_a_machine_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose rows depend on their place is found out at load."""
    linear = torch.nn.functional.linear

    def uneven(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = linear(rows, *rest).clone()
        out[..., -1, :] *= 1 + 2**-20
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", uneven)
    config = CoreConfig(
        model_dir=Path(), dtype="float32", num_pages=8, batch_invariant=True, max_num_seqs=4, token_budget=16
    )
    model = tiny_model("llama", torch.float32)
    with pytest.raises(EnvironmentLacks, match="number of threads"):
        build_engine_on(config, lambda event: None, model, info_of(model))


@pytest.mark.parametrize("setting", [{"decode_buckets": (4,)}, {"fast_path": "require"}])
def test_settings_that_exclude_it_are_refused(setting: dict[str, Any]) -> None:
    config = CoreConfig(model_dir=Path(), dtype="float32", num_pages=8, batch_invariant=True, **setting)
    model = tiny_model("llama", torch.float32)
    with pytest.raises(UsageError, match="batch_invariant"):
        build_engine_on(config, lambda event: None, model, info_of(model))


def test_the_plain_path_is_not_invariant() -> None:
    """The comparison above can fail: without the constant shapes it does, on this very workload."""
    model = tiny_model("llama", torch.bfloat16)
    differing = 0
    for seed in SEEDS:
        plan = random_plan(seed, num_requests=6, sampled=True, aborts=False)
        outcomes, _ = run_plan(model, random_config(seed, plan, dtype="bfloat16"), plan)
        differing += sum(outcomes[p.request.seq_id] != alone(model, p, dtype="bfloat16") for p in plan)
    assert differing > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_threads_and_the_width_of_a_real_model(dtype: str) -> None:
    """Wide enough that products and elementwise loops are split among threads."""
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9}
    config = LlamaConfig(**shape, num_key_value_heads=3, vocab_size=VOCAB * 50, max_position_embeddings=256)
    model = LlamaForCausalLM(config).to(DTYPES[dtype])
    settings: dict[str, Any] = {"dtype": dtype, "batch_invariant": True}
    plan = [
        replace(p, request=replace(p.request, sampling=replace(p.request.sampling, max_tokens=4)))
        for p in random_plan(4, num_requests=3, sampled=True, aborts=False)
    ]
    torch.set_num_threads(2)
    try:
        outcomes, _ = run_plan(model, random_config(4, plan, **settings), plan)
        for planned in plan:
            assert outcomes[planned.request.seq_id] == alone(model, planned, **settings)
    finally:
        torch.set_num_threads(1)
