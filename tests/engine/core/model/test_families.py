"""Every supported family against transformers itself, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, VOCAB, info_of, tiny_model
from transformers import PreTrainedModel
from workloads import random_config, random_plan, reference_outputs, run_plan

from inferdbg.engine.core.model.families import FAMILIES
from inferdbg.engine.core.model.forward import Forward
from inferdbg.engine.core.model.invariant import InvariantForward
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.model.plain import PlainForward
from inferdbg.engine.core.runner import StepBatch

EAGER_ONLY = ("gemma2", "gpt-oss")  # transformers has softcap and sinks in its eager attention alone
SEEDS = (1, 2, 3)


def reference_model(name: str) -> PreTrainedModel:
    model = tiny_model(name, attention="eager" if name in EAGER_ONLY else "sdpa")
    if FAMILIES[type(model).__name__].experts:
        model.set_experts_implementation("eager")  # the default knows no float64
    return model


def chunked_logits(
    model: PreTrainedModel, ids: np.ndarray, edges: list[int], page_size: int, path: type[Forward] = PlainForward
) -> torch.Tensor:
    """Logits of all positions, computed chunk by chunk over scattered pages that held NaN before."""
    num_pages = -(-len(ids) // page_size)
    pool = KVPool(info_of(model), num_pages, page_size, model.dtype, torch.device("cpu"))
    forward = path(model, pool)
    for layer in (*pool.keys, *pool.values):
        layer[:num_pages] = torch.nan
    table = np.random.default_rng(1).permutation(num_pages)[None]
    parts = []
    for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        positions = np.arange(start, end)
        batch = StepBatch(
            token_ids=ids[start:end],
            positions=positions,
            slots=table[0, positions // page_size] * page_size + positions % page_size,
            query_starts=np.array([0, end - start]),
            context_lens=np.array([end]),
            page_tables=table,
            logits_rows=np.arange(end - start),
            num_decodes=int(start > 0 and end - start == 1),
        )
        parts.append(forward.logits(batch).clone())
    return torch.cat(parts)


@pytest.fixture
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' eager attention takes the softmax in float32 whatever the dtype; lift it for a close look."""
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim, dtype=torch.float64)
    )


def test_every_family_is_covered() -> None:
    assert {type(tiny_model(name)).__name__ for name in CONFIGS} == set(FAMILIES)


@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, 61)
    with torch.inference_mode():
        expected = reference_model(name)(torch.from_numpy(ids)[None]).logits[0]
    for path in (PlainForward, InvariantForward):
        got = chunked_logits(tiny_model(name), ids, [1, 8, 9, 40, *range(50, 61)], 4, path)
        assert (got - expected).abs().max().item() < 1e-12
    assert len(expected.argmax(-1).unique()) > 10, "a model that repeats itself proves little"


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_logits_are_near(name: str) -> None:
    """With transformers' own default experts, which float64 cannot use."""
    ids = np.random.default_rng(2).integers(0, VOCAB, 40)
    model = tiny_model(name, torch.float32, attention="eager")
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)[None]).logits[0]
    for path in (PlainForward, InvariantForward):
        got = chunked_logits(tiny_model(name, torch.float32), ids, [17, 18, 30, *range(31, 40)], 8, path)
        assert (got - expected).abs().max().item() < 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_equals_generate(name: str) -> None:
    reference, ours = reference_model(name), tiny_model(name)
    preemptions = cached = mixed = chunked = 0
    for seed in SEEDS:
        plan = random_plan(seed)
        expected = reference_outputs(reference, plan)
        outcomes, totals = run_plan(ours, random_config(seed, plan), plan)
        for planned in plan:
            seq_id = planned.request.seq_id
            got = outcomes[seq_id].token_ids
            if planned.abort_after is None:
                assert got == expected[seq_id], (seed, seq_id)
            else:
                assert got == expected[seq_id][: len(got)], (seed, seq_id)
        preemptions += totals.preemptions
        cached += totals.cached_tokens
        mixed += totals.mixed_steps
        chunked += totals.chunked
    assert min(preemptions, cached, mixed, chunked) > 0
